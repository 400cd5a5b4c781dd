"""One operation striped over two NICs, on the testbed: right results, and bytes on both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from test_testbed import needs_namespaces

testbed = pytest.importorskip("holmes.testbed")


@needs_namespaces
def test_both_rails_carry_the_operation() -> None:
    worker = Path(__file__).with_name("rails_worker.py")
    result = testbed.Testbed("rails").run([sys.executable, str(worker)], timeout_s=60)
    assert result.returncode == 0, result.outputs
    outcomes = [json.loads(line) for lines in result.outputs.values() for line in lines if line.startswith("{")]
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome["right"]
        sent = outcome["sent_bytes"]
        assert set(sent) == {"roce0", "roce1"}
        assert sum(sent.values()) > outcome["payload_bytes"]
        assert min(sent.values()) > outcome["payload_bytes"] / 100
