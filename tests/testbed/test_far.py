"""Between data centres: what far paths and shared uplinks do to operations, over the testbed's lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from namespaces import needs_namespaces
from paths import WORKERS

from holmes.lab.testbed import Testbed
from holmes.lab.testbed.launch import TestbedSession
from holmes.lab.testbed.spec import parse_spec


def _session(link: dict[str, Any], nodes: int = 2) -> TestbedSession:
    network = {"class": "ethernet", **link}
    cluster = {"nodes": nodes, "nics": [{"name": "eth0", "network": "eth"}]}
    return Testbed(parse_spec("far", {"networks": {"eth": network}, "clusters": {"a": cluster}})).session()


def _run(session: TestbedSession, worker: str, *arguments: str) -> Any:
    """What rank 0 printed as JSON."""
    result = session.launch([sys.executable, str(WORKERS / f"{worker}.py"), *arguments]).wait(100.0)
    lines = [line for lines in result.outputs.values() for line in lines]
    assert result.returncode == 0, lines
    (found,) = [json.loads(line) for line in lines if line.startswith("{")]
    return found


@needs_namespaces
@pytest.mark.parametrize("subnet", ["", "fd00:1::/64"], ids=["ipv4", "ipv6"])
def test_packets_carry_the_code_point(subnet: str) -> None:
    with _session({}) as session:
        if subnet:
            for number, node in enumerate(("a0", "a1"), 1):
                address = ["ip", "-6", "addr", "add", f"fd00:1::{number}/64", "dev", "eth0", "nodad"]
                session.exec(node, address)
        found = _run(session, "priority_worker", *([subnet] if subnet else []))
    expected = {"plain": 0, "checkpoints": 1, "data": 10, "tensor": 18, "pipeline": 34, "own": 46, "only-dscp": 8}
    assert {name: list(counts) for name, counts in found.items()} == {
        name: [str(dscp)] for name, dscp in expected.items()
    }
    assert min(sum(counts.values()) for counts in found.values()) > 20  # the connections' first packets too


@needs_namespaces
def test_loss_does_not_slow_a_far_message_down() -> None:
    """An algorithm that takes each loss for congestion carries 5 Mbit/s there: 13 s."""
    if "bbr" not in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split():
        pytest.skip("the kernel has no bbr (modprobe tcp_bbr)")
    with _session({"rate_gbps": 0.1, "delay_ms": 40, "loss_percent": 0.1, "queue_bytes": 1_000_000}) as session:
        found = _run(session, "far_worker", "message")
    assert found["right"]
    assert found["seconds"] < 6


@needs_namespaces
@pytest.mark.parametrize("nodes", [2, 3])
def test_a_round_trip_is_paid_once_for_what_is_queued(nodes: int) -> None:
    """One after the other, 20 operations wait for 20 times 100 ms at least."""
    with _session({"delay_ms": 100}, nodes) as session:
        found = _run(session, "far_worker", "queued")
    assert found["right"]
    if nodes == 2:
        assert found["seconds"] < 1.2


@needs_namespaces
@pytest.mark.parametrize("nodes", [2, 3])
def test_nothing_is_sent_ahead_of_what_it_depends_on(nodes: int) -> None:
    with _session({"delay_ms": 20}, nodes) as session:
        assert _run(session, "far_worker", "chained")["right"]
