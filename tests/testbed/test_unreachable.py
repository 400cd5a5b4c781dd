"""Ranks that cannot reach each other, on the real kernel: the error names both ends, within the deadline."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from namespaces import needs_namespaces
from paths import WORKERS

testbed = pytest.importorskip("holmes.lab.testbed")

CONNECT_TIMEOUT_S = 4.0  # in the worker


@needs_namespaces
def test_unreachable_peer_is_named_by_rank_host_nic_and_address() -> None:
    worker = WORKERS / "unreachable_worker.py"
    result = testbed.Testbed("two-clusters").run([sys.executable, str(worker)], timeout_s=60)
    outcomes = [json.loads(line) for lines in result.outputs.values() for line in lines if line.startswith("{")]
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome["error"] == "UnreachableError", outcome
        assert outcome["seconds"] < CONNECT_TIMEOUT_S + 2
        # The rank of cluster b connects to the one of cluster a.
        for part in ("rank 0 (host a0)", "rank 1 (host b0)", "roce0", "->"):
            assert part in outcome["message"], outcome["message"]


@needs_namespaces
def test_the_rank_that_reaches_nobody_is_named_on_all_ranks() -> None:
    worker = [sys.executable, str(WORKERS / "cut_off_worker.py")]
    result = testbed.Testbed("two-clusters").run(worker, timeout_s=120)
    told = [[json.loads(line) for line in lines if line.startswith("{")] for lines in result.outputs.values()]
    assert len(told) == 4
    for outcomes in told:
        assert [outcome["error"] for outcome in outcomes] == ["UnreachableError"] * 4, outcomes
        assert [outcome["rank"] if outcome["peer"] is None else outcome["peer"] for outcome in outcomes] == [0, 1, 2, 3]
        assert [outcome["host"] for outcome in outcomes] == ["a0", "a1", "b0", "b1"], outcomes


@needs_namespaces
def test_a_rank_down_the_chain_names_the_path_that_is_cut(tmp_path: Path) -> None:
    """Rank 3 waits for 2, which waits for 1 and answers for itself: between these two nothing gets through."""
    worker = [sys.executable, str(WORKERS / "chain_worker.py"), str(tmp_path / "go")]
    with testbed.Testbed("four-nodes").session() as session:
        job = session.launch(worker, nproc_per_node=1)
        for process in job.processes:
            process.wait_for_line("connected", 30)
        for port in ("p1-0", "p2-0"):
            session.exec(None, ["ip", "link", "set", "dev", port, "type", "bridge_slave", "isolated", "on"])
        (tmp_path / "go").touch()
        result = job.wait(60.0)
    outcomes = [json.loads(line) for lines in result.outputs.values() for line in lines if line.startswith("{")]
    assert len(outcomes) == 4
    for outcome in outcomes:
        assert outcome["seconds"] < 3.0 + 2
        assert ({outcome["rank"], outcome["peer"]}, outcome["nic"]) == ({1, 2}, "eth0"), outcome
        assert "nothing gets through from rank 1 (host a1)" in outcome["message"]
