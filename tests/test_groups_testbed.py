"""Groups of a real job on emulated nodes, its ranks shuffled: planned, proven, and on the NICs that were planned."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from test_testbed import needs_namespaces

FAST = {"ib0", "roce0"}


@needs_namespaces
def test_groups_of_shuffled_ranks_use_their_planned_nics() -> None:
    testbed = pytest.importorskip("holmes.testbed")
    pytest.importorskip("torch")
    worker = Path(__file__).with_name("groups_worker.py")
    result = testbed.Testbed("two-clusters").run(
        [sys.executable, str(worker)], nproc_per_node=2, shuffle_seed=7, timeout_s=150
    )
    assert result.returncode == 0, result.outputs
    outcomes: dict[int, Any] = {
        rank: json.loads(line) for rank, lines in result.outputs.items() for line in lines if line.startswith("{")
    }
    assert sorted(outcomes) == list(range(8))
    hosts = outcomes[0]["hosts"]
    assert [sorted(ranks) for ranks in hosts] != [[0, 1], [2, 3], [4, 5], [6, 7]]
    for outcome in outcomes.values():
        inside = outcome["inside"]
        assert inside["holds"]
        for kind, group in inside["groups"].items():
            assert group["ranks"] == inside["planned"][kind]
            nics = {nic for nic, count in group["sent_bytes"].items() if count > 10_000}
            if kind == "tp":
                assert nics == {"shm"}
            elif kind == "dp":
                assert len(nics) == 1
                assert nics <= FAST
            elif kind in ("pp", "embd"):
                assert nics == {"eth0"}
        spanning = outcome["spanning"]
        assert not spanning["holds"]
        assert set(spanning["violations"]) == {"dp", "tp_dp"}
        group = spanning["groups"]["dp"]
        assert group["ranks"] == spanning["planned"]["dp"]
        assert "spans the clusters cluster 0, cluster 1" in group["reason"]
        assert set(group["sent_bytes"]) - {"shm"} > {"eth0"}  # hierarchical: the cluster's own NIC too
