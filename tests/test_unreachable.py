"""Ranks on fabrics that are not joined, on the real kernel: the error names both ends, within the deadline."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from test_testbed import needs_namespaces

testbed = pytest.importorskip("holmes.testbed")

CONNECT_TIMEOUT_S = 4.0  # in the worker


@needs_namespaces
def test_unreachable_peer_is_named_by_rank_host_nic_and_address() -> None:
    worker = Path(__file__).with_name("unreachable_worker.py")
    result = testbed.Testbed("two-clusters").run([sys.executable, str(worker)], timeout_s=60)
    outcomes = [json.loads(line) for lines in result.outputs.values() for line in lines if line.startswith("{")]
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome["error"] == "UnreachableError", outcome
        assert outcome["seconds"] < CONNECT_TIMEOUT_S + 2
        # The rank of cluster b connects to the one of cluster a.
        for part in ("rank 0 (host a0)", "rank 1 (host b0)", "roce0", "->"):
            assert part in outcome["message"], outcome["message"]
