"""Groups of a real job on emulated nodes, its ranks shuffled: planned, proven, and on the NICs that were planned."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from namespaces import needs_namespaces
from paths import WORKERS

from holmes.planning.groups import KINDS

FAST = {"ib0", "roce0"}
SPANNING = {"mp", "pp", "embd", "tp_ep_pp", "world"}


@needs_namespaces
def test_groups_of_shuffled_ranks_use_their_planned_nics() -> None:
    testbed = pytest.importorskip("holmes.lab.testbed")
    pytest.importorskip("torch")
    worker = WORKERS / "groups_worker.py"
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
            # What shares the uplink has its place there, what stays inside a cluster has none.
            assert group["priority"] == (KINDS[kind].priority if kind in SPANNING else None)
        spanning = outcome["spanning"]
        assert not spanning["holds"]
        assert set(spanning["violations"]) == {"dp", "tp_dp"}
        group = spanning["groups"]["dp"]
        assert group["ranks"] == spanning["planned"]["dp"]
        assert group["priority"] is None  # without stages there is nothing that it could hold up
        assert "spans the clusters cluster 0, cluster 1" in group["reason"]
        assert set(group["sent_bytes"]) - {"shm"} > {"eth0"}  # hierarchical: the cluster's own NIC too


EQUAL_RAILS = """
networks:
  rail0: {class: roce_v2, rate_gbps: 0.5}
  rail1: {class: roce_v2, rate_gbps: 0.5}
  eth: {class: ethernet, rate_gbps: 0.1}
clusters:
  a:
    nodes: 2
    nics:
      - {name: roce0, network: rail0, hca: mlx5_0}
      - {name: roce1, network: rail1, hca: mlx5_1}
      - {name: eth0, network: eth}
"""


@needs_namespaces
def test_planned_rails_share_a_group(tmp_path: Path) -> None:
    testbed = pytest.importorskip("holmes.lab.testbed")
    pytest.importorskip("torch")
    (tmp_path / "equal-rails.yaml").write_text(EQUAL_RAILS)
    worker = WORKERS / "planned_rails_worker.py"
    result = testbed.Testbed(tmp_path / "equal-rails.yaml").run([sys.executable, str(worker)], timeout_s=100)
    assert result.returncode == 0, result.outputs
    outcomes = [json.loads(line) for lines in result.outputs.values() for line in lines if line.startswith("{")]
    assert [outcome["planned"] for outcome in outcomes] == [["roce0", "roce1"]] * 2
    total = {nic: sum(outcome["sent_bytes"][nic] for outcome in outcomes) for nic in ("roce0", "roce1")}
    assert min(total.values()) > 1_000_000
