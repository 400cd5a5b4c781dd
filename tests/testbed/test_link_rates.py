"""What the testbed's links carry, measured."""

from __future__ import annotations

import sys

import pytest
from namespaces import needs_namespaces

from holmes.lab.testbed import Testbed, TestbedSession

pytestmark = pytest.mark.alone

PYTHON = sys.executable
TCP_PAYLOAD_SHARE = 0.95  # of a link's rate, MTU 1500: 1448 bytes of 1514 to 1538 on the wire

_RECEIVER = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("listening", flush=True)
peer, _ = server.accept()
buffer = bytearray(1 << 20)
start = time.perf_counter()
while time.perf_counter() - start < 0.2:  # past slow start
    peer.recv_into(buffer)
start, received = time.perf_counter(), 0
while count := peer.recv_into(buffer):
    received, end = received + count, time.perf_counter()
print(received * 8 / (end - start))
"""
_SENDER = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000))
start, data = time.perf_counter(), bytes(1 << 18)
while time.perf_counter() - start < 1.2:
    peer.sendall(data)
"""


def _bandwidth_bits_per_s(session: TestbedSession, sender: str, receiver: str, nic: str) -> float:
    address = str(session.spec.node(receiver).nic(nic).address.ip)
    sink = session.spawn(receiver, [PYTHON, "-c", _RECEIVER, address])
    sink.wait_for_line("listening", 5)
    session.exec(sender, [PYTHON, "-c", _SENDER, address])
    assert sink.wait(10) == 0
    return float(sink.lines[-1])


@needs_namespaces
@pytest.mark.parametrize(("sender", "receiver"), [("a0", "a1"), ("a1", "a0")])
def test_links_carry_their_rate_in_both_directions(sender: str, receiver: str) -> None:
    """Never more than the rate; all of it as soon as the machine gives both processes their time."""
    goal = TCP_PAYLOAD_SHARE * 1e9
    measured: list[float] = []
    with Testbed("two-clusters").session() as session:
        while len(measured) < 5 and max(measured, default=0.0) < 0.95 * goal:
            measured.append(_bandwidth_bits_per_s(session, sender, receiver, "ib0"))
            assert measured[-1] < 1.05 * goal
    assert max(measured) == pytest.approx(goal, rel=0.05), measured


@needs_namespaces
def test_a_rate_changes_during_a_run() -> None:
    with Testbed("pair").session() as session:
        session.set_rate("a0", "eth0", 0.05)
        slow = _bandwidth_bits_per_s(session, "a0", "a1", "eth0")
        assert slow == pytest.approx(TCP_PAYLOAD_SHARE * 0.05e9, rel=0.1)
