"""Links that delay, lose and reorder packets, with the kernel at both ends (how exactly: `holmes testbed check`)."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from namespaces import child_env, needs_namespaces, unprivileged_python

from holmes.lab.testbed import Testbed, TestbedError
from holmes.lab.testbed.check import check_testbed
from holmes.lab.testbed.launch import TestbedSession
from holmes.lab.testbed.spec import parse_spec

PYTHON = sys.executable

# Answers every datagram, to the last one.
_ECHO = """
import socket, sys
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.bind((sys.argv[1], 7000))
print("listening", flush=True)
data = b""
while data != b"last":
    data, peer = link.recvfrom(100)
    link.sendto(data, peer)
"""
# Sends numbered datagrams, a millisecond apart; prints how many milliseconds after each its answer came. None is sent
# before another one was answered, where that may be hoped for: the question for an address may be lost too. With one
# word more the other side ends; not where another one follows, which a late datagram would end.
_PING = """
import json, socket, sys, time
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.connect((sys.argv[1], 7000))
sent, took = {}, {}
def take(until):
    while (left := until - time.monotonic()) > 0:
        link.settimeout(left)
        try:
            number = link.recv(100).decode()
        except TimeoutError:
            return
        if number in sent:
            took[number] = 1000 * (time.monotonic() - sent[number])
link.settimeout(1)
for _ in range(int(sys.argv[3])):
    try:
        link.send(b"first")
        link.recv(100)
        break
    except TimeoutError:
        pass
    except ConnectionRefusedError:  # the other one does not listen yet
        time.sleep(0.5)
for number in map(str, range(int(sys.argv[2]))):
    sent[number] = time.monotonic()
    link.send(number.encode())
    take(sent[number] + 0.001)
take(time.monotonic() + 1)
try:
    for _ in range(10 * len(sys.argv[4:])):  # a few may be lost
        link.send(b"last")
except ConnectionRefusedError:
    pass  # it has ended
print(json.dumps(took))
"""


def _spec(network: dict[str, Any], nodes: int = 2, clusters: str = "a") -> dict[str, Any]:
    nics = [{"name": "eth0", "network": "eth"}]
    return {
        "networks": {"eth": {"class": "ethernet", "rate_gbps": 1, **network}},
        "clusters": {name: {"nodes": nodes, "nics": nics} for name in clusters},
    }


def _session(network: dict[str, Any], **more: Any) -> TestbedSession:
    return Testbed(parse_spec("lines", _spec(network, **more))).session()


def _ping_ms(session: TestbedSession, node: str, other: str, count: int, tries: int = 30) -> list[float]:
    address = str(session.spec.node(other).nic("eth0").address.ip)
    echo = session.spawn(other, [PYTHON, "-c", _ECHO, address])
    echo.wait_for_line("listening", 20)
    ping = [PYTHON, "-c", _PING, address, str(count), str(tries)]
    took = json.loads(session.exec(node, ping, timeout_s=60))
    echo.kill()
    echo.wait(20)
    return list(took.values())


@needs_namespaces
def test_packets_are_delayed_and_lost() -> None:
    with _session({"delay_ms": 20, "loss_percent": 10}) as session:
        took_ms = _ping_ms(session, "a0", "a1", 300)
    assert min(took_ms) >= 40
    assert statistics.median(took_ms) < 400  # on a busy machine
    assert 150 < len(took_ms) < 290  # 243 of them have both their ways


@needs_namespaces
def test_check_measures_every_path(tmp_path: Path) -> None:
    """That it is right is for a quiet machine."""
    (tmp_path / "far.yaml").write_text(yaml.safe_dump(_spec({"delay_ms": 20, "loss_percent": 5, "rate_gbps": 0.05})))
    command = [PYTHON, "-m", "holmes", "testbed", "check", "far.yaml", "--seconds", "0.5", "--json", "found.json"]
    environment = child_env() | {"COLUMNS": "80"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode in (0, 1), done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    found = json.loads((tmp_path / "found.json").read_text())
    assert [path["sender"] for path in found] == ["a0.eth0", "a1.eth0"]
    for path in found:
        assert path["round_trip_ms"]["expected"] == 40
        assert path["round_trip_ms"]["measured"] >= 40
        assert path["gbps"]["expected"] == pytest.approx(0.0475)
        assert path["gbps"]["measured"] > 0
        assert path["loss_percent"]["expected"] == pytest.approx(5)
        assert path["packets"] > 100
        assert path["loss_percent"]["measured"] > 1
        assert f"{path['sender']} " in done.stdout
    are_right = [quantity["is_right"] for path in found for quantity in path.values() if isinstance(quantity, dict)]
    assert done.returncode == (0 if all(are_right) else 1), done.stdout


# A stream in both directions at once, each with what the other side must have.
_EXCHANGE = """
import hashlib, socket, sys, threading
server, address, size = sys.argv[1] == "server", sys.argv[2], 4_000_000
if server:
    listener = socket.create_server((address, 7001))
    print("listening", flush=True)
    link = listener.accept()[0]
else:
    link = socket.create_connection((address, 7001))
data = bytes(range(251)) * (size // 251)
threading.Thread(target=link.sendall, args=(data,)).start()
seen, left = hashlib.sha256(), len(data)
while left > 0:
    part = link.recv(1 << 16)
    assert part, f"{left} bytes are missing"
    seen.update(part)
    left -= len(part)
assert seen.digest() == hashlib.sha256(data).digest()
print("whole")
"""


@needs_namespaces
@pytest.mark.parametrize("mtu", [1500, 9000])
def test_a_stream_survives_a_bad_link(mtu: int) -> None:
    """What is cut out of TCP's super-packets is what TCP would have sent, or the kernel would not take it."""
    bad = {"delay_ms": 5, "jitter_ms": 2, "loss_percent": 1, "reorder_percent": 1, "mtu": mtu}
    with _session(bad) as session:
        address = str(session.spec.node("a1").nic("eth0").address.ip)
        server = session.spawn("a1", [PYTHON, "-c", _EXCHANGE, "server", address])
        server.wait_for_line("listening", 20)
        assert "whole" in session.exec("a0", [PYTHON, "-c", _EXCHANGE, "client", address], timeout_s=100)
        assert server.wait(60) == 0, server.lines


@needs_namespaces
def test_an_uplink_delays_what_leaves_its_cluster_only() -> None:
    with _session({"uplink": {"rate_gbps": 0.5, "delay_ms": 30}}, clusters="ab") as session:
        assert min(_ping_ms(session, "a0", "a1", 50)) < 30
        assert min(_ping_ms(session, "a0", "b1", 50)) >= 60


@needs_namespaces
def test_nics_and_uplinks_add_up_and_only_what_is_sent_is_delayed() -> None:
    spec = _spec({"uplink": {"delay_ms": 40}}, clusters="ab")
    spec["clusters"]["a"]["nodes"] = {"a0": {"eth0": {"delay_ms": 20}}, "a1": {}}
    with Testbed(parse_spec("lines", spec)).session() as session:
        assert 20 <= min(_ping_ms(session, "a1", "a0", 50)) < 60
        assert min(_ping_ms(session, "b0", "b1", 50)) < 40
        assert min(_ping_ms(session, "b0", "a0", 50)) >= 100


@needs_namespaces
def test_links_change_while_they_are_used() -> None:
    with _session({"delay_ms": 5, "uplink": {"rate_gbps": 1, "delay_ms": 20}}, clusters="ab") as session:
        assert min(_ping_ms(session, "a0", "b0", 50)) >= 50
        session.change_link("eth/a", delay_ms=60)
        session.change_link("a0.eth0", delay_ms=30)
        assert min(_ping_ms(session, "a0", "b0", 50)) >= 115
        session.change_link("a0.eth0", delay_ms=0, loss_percent=50)
        session.change_link("eth/a", delay_ms=0, rate_gbps=0.1)
        assert 25 <= min(took_ms := _ping_ms(session, "a0", "b0", 100)) < 115
        assert 10 < len(took_ms) < 90
        assert "rate 100Mbit" in session.exec(None, ["tc", "qdisc", "show", "dev", "up0-0"])
        session.change_link("eth/a", up=False)
        assert _ping_ms(session, "a0", "b0", 20, tries=0) == []
        assert _ping_ms(session, "a1", "a0", 20) != []
        session.change_link("eth/a", up=True)
        assert _ping_ms(session, "a0", "b0", 100) != []


@needs_namespaces
def test_a_file_changes_links_at_its_times(tmp_path: Path) -> None:
    (tmp_path / "changes.yaml").write_text("changes: [{at_s: 0.2, link: a0.eth0, up: false}]")
    wait = 'until [ "$(cat /sys/class/net/eth0/operstate)" = down ] || [ $RANK = 1 ]; do sleep 0.1; done; echo seen'
    command = [PYTHON, "-m", "holmes", "testbed", "run", "-s", "pair", "--changes", "changes.yaml", "--timeout-s", "60"]
    done = subprocess.run(
        [*command, "--", "sh", "-c", wait], env=child_env(), cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "holmes testbed: after 0.2 s a0.eth0: up False" in done.stderr


@needs_namespaces
def test_a_link_that_nothing_passes_cannot_be_checked() -> None:
    with pytest.raises(
        TestbedError, match=r"a0.eth0 to a1.eth0: no connection, so nothing can be measured: .*smaller$"
    ):
        check_testbed(parse_spec("dead", _spec({"loss_percent": 99})), 0.1)


@needs_namespaces
def test_a_program_that_ends_too_early_has_the_last_word() -> None:
    with _session({"delay_ms": 1}) as session:
        process = session.spawn("a0", ["sh", "-c", "echo no such thing; exit 3"])
        with pytest.raises(TestbedError, match=r"ended with 3 before a line with 'ready': no such thing$"):
            process.wait_for_line("ready", 20)


@needs_namespaces
def test_the_end_of_the_links_is_told() -> None:
    with _session({"delay_ms": 1}) as session:
        job = session.launch(["sleep", "60"])
        assert session._line is not None
        session._line.kill()
        with pytest.raises(TestbedError, match=r"the links have ended: holmes-line was ended by SIGKILL$"):
            job.wait(20)


@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="the whole suite already runs unprivileged")
def test_an_unprivileged_user_has_them_too() -> None:
    user = unprivileged_python()
    address = "10.10.0.2"
    script = f"""
        if [ $RANK = 1 ]; then exec {user[-1]} -c "$ECHO" {address} > /dev/null; fi
        {user[-1]} -c "$PING" {address} 100 60 end
    """
    environment = child_env() | {"ECHO": _ECHO, "PING": _PING}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as spec:  # not below pytest's folders: they are its user's
        Path(spec.name).chmod(0o644)
        yaml.safe_dump(_spec({"delay_ms": 20, "loss_percent": 1}), spec)
        spec.flush()
        command = [*user, "-m", "holmes", "testbed", "run", "--spec", spec.name, "--timeout-s", "60"]
        done = subprocess.run(
            [*command, "--", "sh", "-c", script], env=environment, cwd="/", capture_output=True, text=True, timeout=120
        )
    assert "[a0/rank 0] {" in done.stdout, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[a0/rank 0] {")]
    took_ms = list(json.loads(line.partition("] ")[2]).values())
    assert len(took_ms) > 50, done.stderr
    assert min(took_ms) >= 40
