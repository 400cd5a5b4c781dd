"""A pair on one NIC each, with the default deadlines: a cut that nobody is told of, and a peer that is only slow."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest
from namespaces import needs_namespaces
from paths import WORKERS

testbed = pytest.importorskip("holmes.lab.testbed")

PEER_TIMEOUT_S = 30.0  # docs/recovery.md
BUSY_S = 10.0
WORKER = str(WORKERS / "silent_cut_worker.py")


def _outcomes(result: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for lines in result.outputs.values() for line in lines if line.startswith("{")]


@needs_namespaces
def test_a_silent_cut_in_mid_transfer_names_the_peer_in_bounded_time() -> None:
    with testbed.Testbed("pair").session() as session:
        job = session.launch([sys.executable, WORKER, "1000000", "0"], nproc_per_node=1)
        for process in job.processes:
            process.wait_for_line("connected", 60)
        time.sleep(0.5)
        for port in ("p0-0", "p1-0"):
            session.exec(None, ["ip", "link", "set", "dev", port, "type", "bridge_slave", "isolated", "on"])
        result = job.wait(PEER_TIMEOUT_S + 3 * BUSY_S)
    outcomes = _outcomes(result)
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome["error"] == "PeerLostError", outcome
        assert outcome["peer"] == 1 - outcome["rank"]
        assert outcome["nic"], outcome
        assert f"rank {outcome['peer']} (host {outcome['host']}) on NIC {outcome['nic']} is lost" in outcome["message"]
        assert outcome["seconds"] < PEER_TIMEOUT_S + BUSY_S, outcome


@needs_namespaces
def test_a_peer_that_is_stopped_for_longer_is_not_lost() -> None:
    """Its kernel lives: it answers probes of a closed window, and of a quiet connection."""
    stopped_s = PEER_TIMEOUT_S + BUSY_S
    with testbed.Testbed("pair").session() as session:
        job = session.launch([sys.executable, WORKER, "200", str(stopped_s)], nproc_per_node=1)
        result = job.wait(stopped_s + 100.0)
    outcomes = _outcomes(result)
    assert [outcome["error"] for outcome in outcomes] == [None, None], outcomes
    assert min(outcome["longest_s"] for outcome in outcomes) > stopped_s - BUSY_S
