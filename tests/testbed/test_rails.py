"""One operation striped over two NICs, on the testbed: right results, bytes on both, and rails that are lost."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from namespaces import needs_namespaces
from paths import WORKERS

testbed = pytest.importorskip("holmes.lab.testbed")
from holmes.lab.testbed.spec import parse_spec  # noqa: E402

WORKER = WORKERS / "rails_worker.py"
DEADLINE_S = 20.0  # of an operation, as the worker has it
Break = Callable[[Any, str], None]


def _far_rails() -> Any:
    """As the spec "rails", with a round trip of 20 ms and lost packets."""
    link = {"class": "roce_v2", "rate_gbps": 0.25, "delay_ms": 10, "loss_percent": 0.1}
    nics = [{"name": f"roce{i}", "network": f"rail{i}", "hca": f"mlx5_{i}"} for i in range(2)]
    return parse_spec(
        "far-rails", {"networks": {"rail0": link, "rail1": link}, "clusters": {"a": {"nodes": 2, "nics": nics}}}
    )


def _run(
    scenario: str, break_rail: Break | None = None, at: str = "", spec: Any = "rails", **env: str
) -> tuple[list[Any], list[str], int]:
    """Runs the worker on both nodes; returns their outcomes, the warnings and the exit code.

    `break_rail(session, line)` is called when rank 0 has printed a line with the text `at`.
    """
    with testbed.Testbed(spec).session() as session:
        job = session.launch([sys.executable, str(WORKER), scenario], env=env)
        if break_rail is not None:
            break_rail(session, job.processes[0].wait_for_line(at, 60.0))
        result = job.wait(120.0)
    lines = [line for lines in result.outputs.values() for line in lines]
    outcomes = [json.loads(line) for line in lines if line.startswith("{")]
    assert outcomes, lines
    return outcomes, [line for line in lines if " warn: " in line], result.returncode


def _interface_down(session: Any, _: str) -> None:
    session.set_link("a1", "roce1", up=False)


def _silence(session: Any, _: str) -> None:
    """Frames are dropped on the way; both NICs stay up."""
    session.exec(None, ["ip", "link", "set", "dev", "br1", "down"])


def _reset(session: Any, line: str) -> None:
    """Every connection over the NIC is reset, as a firewall that lost its state would do."""
    for address in line.split()[2:]:
        session.exec("a0", ["ss", "-K", "src", address])


def _check_survived(outcomes: list[Any], warnings: list[str], returncode: int) -> None:
    assert returncode == 0, outcomes
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome["wrong"] == 0
        assert outcome["longest_s"] < DEADLINE_S / 2
        assert ["collective", "roce1"] in outcome["retired"]
        assert all(interface == "roce1" for _, interface in outcome["retired"])
    # One line on each side, naming communicator, NIC, peer and its host.
    for rank in (0, 1):
        own = [line for line in warnings if f"rank {rank}/" in line]
        assert len(own) == 1, warnings
        expected = f"'holmes/rails' lost the connection to rank {1 - rank} (host a{1 - rank}) over NIC roce1"
        assert expected in own[0]


@needs_namespaces
@pytest.mark.parametrize("streams", [1, 2])
def test_both_rails_carry_the_operation(streams: int) -> None:
    outcomes, warnings, returncode = _run("plain", STREAMS=str(streams))
    assert returncode == 0
    assert not warnings
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome["right"]
        sent = outcome["sent_bytes"]
        assert set(sent) == {"roce0", "roce1"}
        assert sum(sent.values()) > outcome["payload_bytes"]
        assert min(sent.values()) > outcome["payload_bytes"] / 100


@needs_namespaces
@pytest.mark.parametrize("break_rail", [_interface_down, _silence, _reset])
def test_a_lost_rail_is_survived(break_rail: Break) -> None:
    _check_survived(*_run("lossy", break_rail, "operation 33"))


@needs_namespaces
def test_a_lost_far_rail_is_survived() -> None:
    """With a round trip's worth of chunks under way on it."""
    _check_survived(*_run("lossy", _reset, "operation 33", _far_rails()))


@needs_namespaces
def test_a_rail_lost_between_operations_is_survived() -> None:
    _check_survived(*_run("idle", _interface_down, "resting"))


@needs_namespaces
def test_a_peer_that_does_not_read_is_no_loss() -> None:
    outcomes, warnings, returncode = _run("unread", HOLMES_RAIL_TIMEOUT_S="0.2")
    assert returncode == 0
    assert not warnings
    assert [(outcome["right"], outcome["retired"]) for outcome in outcomes] == [(True, [])] * 2


@needs_namespaces
@pytest.mark.parametrize("break_rail", [_interface_down, _silence])
def test_a_peer_that_dies_on_the_last_rail_is_named(break_rail: Break) -> None:
    outcomes, _, _ = _run("lonely", break_rail, "operation 2")
    (outcome,) = outcomes
    assert (outcome["peer"], outcome["host"]) == (1, "a1")
    assert outcome["seconds"] < DEADLINE_S / 2
