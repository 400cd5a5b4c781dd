"""Between data centres: what far paths and shared uplinks do to operations, over the testbed's lines."""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from namespaces import needs_namespaces
from paths import WORKERS

from holmes.lab.testbed import Testbed
from holmes.lab.testbed.check import slowness
from holmes.lab.testbed.launch import TestbedSession
from holmes.lab.testbed.spec import parse_spec


def _session(link: dict[str, Any], nodes: int = 2) -> TestbedSession:
    network = {"class": "ethernet", **link}
    cluster = {"nodes": nodes, "nics": [{"name": "eth0", "network": "eth"}]}
    return Testbed(parse_spec("far", {"networks": {"eth": network}, "clusters": {"a": cluster}})).session()


def _run_told(session: TestbedSession, worker: str, *arguments: str, **env: str) -> tuple[Any, list[str]]:
    """What rank 0 printed as JSON, and all lines."""
    result = session.launch([sys.executable, str(WORKERS / f"{worker}.py"), *arguments], env=env).wait(100.0)
    lines = [line for lines in result.outputs.values() for line in lines]
    assert result.returncode == 0, lines
    (found,) = [json.loads(line) for line in lines if line.startswith("{")]
    return found, lines


def _run(session: TestbedSession, worker: str, *arguments: str) -> Any:
    return _run_told(session, worker, *arguments)[0]


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


_on_a_quiet_machine = pytest.mark.skipif(
    "HOLMES_TEST_QUIET" not in os.environ, reason="times a link: on a quiet machine, HOLMES_TEST_QUIET=1"
)
_HAS_BBR = "bbr" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
_needs_bbr = pytest.mark.skipif(not _HAS_BBR, reason="the kernel has no bbr (modprobe tcp_bbr)")
#: To a far rank, of each purpose, in small groups.
_FAR_STREAMS = 4 if _HAS_BBR else 16


@_needs_bbr
@needs_namespaces
def test_loss_does_not_slow_a_far_message_down() -> None:
    """An algorithm that takes each loss for congestion carries 5 Mbit/s there: 13 s."""
    with _session({"rate_gbps": 0.1, "delay_ms": 40, "loss_percent": 0.1, "queue_bytes": 1_000_000}) as session:
        found = _run(session, "far_worker", "message")
    assert found["right"]
    assert found["seconds"] < 6


_SHARES = "4 p2p connections share the stream"


@needs_namespaces
@pytest.mark.parametrize(("env", "connections"), [({}, _FAR_STREAMS), ({"HOLMES_TCP_CONGESTION": "reno"}, 16)])
def test_a_path_that_one_buffer_does_not_fill_is_shared(env: dict[str, str], connections: int) -> None:
    """Of 1 Gbit/s and 120 ms, 15 MB are under way; one connection's buffer holds 8 MiB at most, that of four all."""
    if int(Path("/proc/sys/net/core/wmem_max").read_text()) > 4 << 20:
        pytest.skip("one connection's buffer may hold as much as is under way")
    with _session({"rate_gbps": 1, "delay_ms": 60, "queue_bytes": 15_000_000}) as session:
        found, lines = _run_told(session, "far_worker", "shared", "24", HOLMES_LOG="info", **env)
    assert found["right"]
    assert len(found["sent"]) == connections
    assert min(found["sent"][:4]) > 1e6
    # That a socket takes no more tells of its buffer only where that is full, not where little may wait unsent in it.
    assert not [line for line in lines if "the buffer of 4 connections" in line]
    # By rank 0, which sends; once. Without bbr all are used from the beginning.
    assert sum(_SHARES in line for line in lines) == (connections == 4)


@needs_namespaces
def test_without_bbr_the_first_message_goes_over_all_connections() -> None:
    """Each begins with a small window, and each lost packet makes it smaller."""
    with _session({"rate_gbps": 0.2, "delay_ms": 10, "loss_percent": 0.1, "queue_bytes": 500_000}) as session:
        found, _ = _run_told(session, "far_worker", "shared", "2", "1", HOLMES_TCP_CONGESTION="reno")
    assert found["right"]
    assert len(found["sent"]) == 16
    assert min(found["sent"]) > 10_000


@needs_namespaces
@pytest.mark.parametrize(("delay_ms", "unsent_kib"), [(10, 32), (0, 128)], ids=["far", "near"])
def test_little_waits_in_each_of_many_far_connections(delay_ms: float, unsent_kib: int) -> None:
    """At its end an operation waits for what the one with the smallest window holds."""
    with _session({"delay_ms": delay_ms}) as session:
        found, _ = _run_told(session, "far_worker", "striped", HOLMES_TCP_CONGESTION="reno")
    assert found["unsent"] == [unsent_kib << 10] * 48
    # By rates, which are known round trips after the windows have grown, it is 850; and 512 are under way at most.
    if delay_ms:
        assert min(found["chunks"]) < 600


@needs_namespaces
@pytest.mark.parametrize("env", [{}, {"HOLMES_TCP_CONGESTION": "reno"}], ids=["by itself", "reno"])
def test_a_connection_that_became_slow_holds_up_nobody(env: dict[str, str]) -> None:
    """What it has in its socket, 100 KB and more, would arrive after 12 s: the others bring it."""
    with _session({"rate_gbps": 0.2, "delay_ms": 10, "queue_bytes": 500_000}) as session:
        found, _ = _run_told(session, "far_worker", "slowed", **env)
    assert found["right"]
    assert found["seconds"] < 6


@needs_namespaces
@pytest.mark.parametrize(
    ("delay_ms", "env", "connections"),
    [(10, {}, _FAR_STREAMS), (10, {"HOLMES_FAR_STREAMS": "2"}, 2), (10, {"HOLMES_FAR_STREAMS": "1"}, 1), (0, {}, 1)],
    ids=["far", "two", "one", "near"],
)
def test_a_path_that_one_connection_fills_is_left_to_it(delay_ms: float, env: dict[str, str], connections: int) -> None:
    """0.5 MB are under way. A near peer gets no connection more than ever."""
    with _session({"rate_gbps": 0.2, "delay_ms": delay_ms, "queue_bytes": 500_000}) as session:
        found, lines = _run_told(session, "far_worker", "shared", "2", HOLMES_LOG="info", **env)
    assert found["right"]
    assert len(found["sent"]) == connections
    assert found["sent"][0] > 20e6
    assert sum(found["sent"][1:]) == 0
    assert not [line for line in lines if _SHARES in line]


@_needs_bbr
@needs_namespaces
def test_a_lossy_path_that_bbr_fills_is_left_to_one_connection() -> None:
    with _session({"rate_gbps": 0.2, "delay_ms": 20, "loss_percent": 0.1, "queue_bytes": 1_000_000}) as session:
        found, _ = _run_told(session, "far_worker", "shared", "6")
    assert found["right"]
    assert found["sent"][0] > 60e6
    assert found["sent"][1:] == [0, 0, 0]


@_needs_bbr
@needs_namespaces
def test_a_start_of_bbr_ends_though_its_window_is_larger_than_the_buffer() -> None:
    """5 MB are under way, and 2.9 times as much in bbr's start; a buffer holds 8 MiB. The queue is behind the NIC."""
    if int(Path("/proc/sys/net/core/wmem_max").read_text()) > 4 << 20:
        pytest.skip("one connection's buffer may hold all that bbr's start has under way (net.core.wmem_max)")
    uplink = {"rate_gbps": 0.2, "delay_ms": 100, "queue_bytes": 5_000_000}
    network = {"class": "ethernet", "rate_gbps": 0.8, "uplink": uplink}
    clusters = {name: {"nodes": 1, "nics": [{"name": "eth0", "network": "eth"}]} for name in "ab"}
    with Testbed(parse_spec("start", {"networks": {"eth": network}, "clusters": clusters})).session() as session:
        found = _run(session, "far_worker", "shared", "24")
    assert found["right"]
    assert found["started"]


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


@needs_namespaces
def test_a_probe_that_is_lost_is_no_lost_peer() -> None:
    """The first one leaves after 20 s of silence."""
    with _session({"delay_ms": 10}) as session:
        job = session.launch([sys.executable, str(WORKERS / "far_worker.py"), "resting"])
        job.processes[0].wait_for_line("resting", 60.0)
        time.sleep(18)
        session.change_link("a0.eth0", up=False)
        time.sleep(4)
        session.change_link("a0.eth0", up=True)
        result = job.wait(60.0)
    lines = [line for lines in result.outputs.values() for line in lines]
    assert result.returncode == 0, lines
    assert [json.loads(line)["right"] for line in lines if line.startswith("{")] == [True]


@needs_namespaces
@pytest.mark.parametrize("delay_ms", [0, 20])
def test_messages_of_high_priority_go_before_another_groups(delay_ms: float) -> None:
    """1 MiB takes 170 ms and the way there alone. Far, bbr makes no queue: what has to wait is in its socket."""
    with _session({"rate_gbps": 0.05, "delay_ms": delay_ms}) as session:
        found = _run(session, "far_worker", "beside")
    assert found["priorities"] < 0.75 * found["plain"], found


@_on_a_quiet_machine
@needs_namespaces
def test_a_host_gives_way_to_a_message_of_the_one_beside_it() -> None:
    """84 ms of the link, behind a queue of 20 to 30. With what a socket holds in front of them it would be 420."""
    network = {"class": "ethernet", "rate_gbps": 0.5, "uplink": {"rate_gbps": 0.05, "queue_ms": 50}}
    clusters = {name: {"nodes": 2, "nics": [{"name": "eth0", "network": "eth"}]} for name in "ab"}
    with Testbed(parse_spec("beside", {"networks": {"eth": network}, "clusters": clusters})).session() as session:
        found = _run(session, "far_worker", "uplink")
    alone_ms, busy_ms = (statistics.median(found[key]) for key in ("alone", "busy"))
    assert 80 < alone_ms < 120, found
    assert busy_ms < 2 * alone_ms, found


@needs_namespaces
@pytest.mark.parametrize("delay_ms", [0, 20])
def test_pipelines_take_turns_on_what_joins_clusters(delay_ms: float) -> None:
    """2 MiB of each of two hosts; the way takes 170 ms alone. What the later one has in flight is in front."""
    network = {"class": "ethernet", "rate_gbps": 0.5, "uplink": {"rate_gbps": 0.1, "delay_ms": delay_ms}}
    clusters = {name: {"nodes": 2, "nics": [{"name": "eth0", "network": "eth"}]} for name in "ab"}
    with Testbed(parse_spec("turns", {"networks": {"eth": network}, "clusters": clusters})).session() as session:
        found = _run(session, "far_worker", "turns")
    (first, other), shared = ([statistics.median(ms) for ms in found[name]] for name in ("turns", "shared"))
    assert first < 0.8 * min(shared), found
    assert other < 1.25 * max(shared), found


@needs_namespaces
@pytest.mark.parametrize(
    ("delay_ms", "arguments"), [(10, []), (0, ["never"]), (0, [""])], ids=["far", "named", "hierarchical"]
)
def test_what_is_between_clusters_is_told_apart(delay_ms: float, arguments: list[str]) -> None:
    """By the clusters' names, where there are some: in groups of one rank each and in a hierarchy's parts too."""
    network = {"class": "ethernet", "uplink": {"rate_gbps": 0.5, "delay_ms": delay_ms}}
    nics = [{"name": "eth0", "network": "eth"}]
    clusters = {"a": {"nodes": 2, "nics": nics}, "b": {"nodes": 1, "nics": nics}}
    with Testbed(parse_spec("counted", {"networks": {"eth": network}, "clusters": clusters})).session() as session:
        found = _run(session, "far_worker", "counted", *arguments)
    by_path = {path: [nic for nic in found["nics"] if nic["path"] == path] for path in ("intra", "inter")}
    assert {nic["nic"] for nics in by_path.values() for nic in nics} == {"eth0"}
    own = {path: next(nic for nic in nics if nic["group"].endswith("pp")) for path, nics in by_path.items()}
    # The messages, and the all_reduce: flat both ranks get all of it at once, or half of it twice.
    if arguments != [""]:
        assert 1e6 <= own["intra"]["sent_bytes"] < 3.2e6
        assert 3e6 <= own["inter"]["sent_bytes"] < 5.2e6
        assert own["intra"]["connections"] == 3  # control, collective, p2p
        assert own["inter"]["connections"] == (
            1 + 2 * _FAR_STREAMS if delay_ms else 3
        )  # of a far one most are in reserve
    else:  # parts have names of their own
        parts = {nic["group"].rpartition("/")[2]: nic["path"] for nic in found["nics"]}
        assert parts == {"pp": parts["pp"], "cluster0.scatter": "intra", "cluster0.gather": "intra", "cross0": "inter"}
    assert own["intra"]["round_trip_s"] > 0
    assert own["inter"]["round_trip_s"] >= 2e-3 * delay_ms
    assert f'holmes_sent_bytes_total{{group="{own["inter"]["group"]}",nic="eth0",path="inter",rank="0"' in found["text"]
    assert "holmes_path_changes_total{" in found["text"]
    ends = ["cluster a", "cluster b"] if arguments else ["host a0", "host b0"]
    assert found["links"] == [["eth0", *ends]]


@needs_namespaces
def test_what_crosses_is_seen_by_group_stream_and_time(tmp_path: Path) -> None:
    """While the uplink is down, 1.5 s, the stream that sends over it stalls, and nothing inside the cluster."""
    uplink = {"rate_gbps": 0.05, "delay_ms": 20, "queue_bytes": 250_000}
    nics = [{"name": "eth0", "network": "eth"}]
    clusters = {"a": {"nodes": 2, "nics": nics}, "b": {"nodes": 1, "nics": nics}}
    spec = parse_spec("seen", {"networks": {"eth": {"class": "ethernet", "uplink": uplink}}, "clusters": clusters})
    with Testbed(spec).session() as session:
        job = session.launch([sys.executable, str(WORKERS / "far_worker.py"), "seen", str(tmp_path)])
        until = time.monotonic() + 60
        while not (tmp_path / "begun").exists() and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(2)
        session.change_link("eth/a", up=False)
        time.sleep(1.5)
        session.change_link("eth/a", up=True)
        time.sleep(5)
        (tmp_path / "stop").touch()
        result = job.wait(60.0)
    lines = [line for lines in result.outputs.values() for line in lines]
    assert result.returncode == 0, lines
    (found,) = [json.loads(line) for line in lines if line.startswith("{")]
    # By group, and of each stream.
    inter, intra = ([nic for nic in found["nics"] if nic["path"] == path] for path in ("inter", "intra"))
    assert sum(nic["stalls"] for nic in inter) >= 1
    assert 1.2 < sum(nic["stalled_s"] for nic in inter) < 8
    assert sum(nic["stalls"] + nic["stalled_s"] for nic in intra) == 0
    assert sum(nic["busy_s"] for nic in inter) > 3
    assert {"receiver_limited_s", "buffer_limited_s"} < inter[0].keys()
    assert 'holmes_stalled_seconds_total{group="pp",nic="eth0",path="inter"' in found["text"]
    across = [c for c in found["connections"] if c["peer"] == 2 and c["purpose"] == "p2p"]
    assert {c["path"] for c in across} == {"inter"}
    assert {c["path"] for c in found["connections"] if c["peer"] == 1} == {"intra"}
    assert sum(c["stalls"] for c in across) >= 1
    assert sum(c["stalled_us"] for c in across) > 1.2e6
    # In the record, by communicator; and the link by time.
    (own,) = [one for one in found["record"]["communicators"] if one["name"].endswith("pp")]
    sent = {nic["path"]: nic["sent_bytes"] for nic in own["nics"]}
    assert found["across"] <= sent["inter"] < 1.1 * found["across"] + 1e5
    assert 1e6 <= sent["intra"] < 1.2e6
    (link,) = found["record"]["links"]
    assert (link["nic"], link["from"], link["to"]) == ("eth0", "cluster a", "cluster b")
    _check_trace(tmp_path, found["across"])


def _check_trace(folder: Path, across: int) -> None:
    """What the link carried is there by time: all of it, not faster than it is, nothing while it was down."""
    command = [sys.executable, "-m", "holmes", "debug", str(folder), "--trace", str(folder / "trace")]
    subprocess.run(command, check=False, capture_output=True)  # that a rank has ended is a finding
    events = json.loads((folder / "trace").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    counters: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "C" and names[event["pid"]] == "links between clusters":
            (value,) = event["args"].values()
            counters.setdefault(event["name"], []).append((event["ts"] * 1e-6, value))
    there = "cluster a to cluster b"
    rates, round_trips, stalled = (counters[f"{there}, {unit}"] for unit in ("Mbit/s", "round trip ms", "stalled"))
    spans = [(then - at, rate) for (at, rate), (then, _) in itertools.pairwise(rates)]
    sent_bytes = sum(seconds * rate for seconds, rate in spans) * 1e6 / 8
    assert across <= sent_bytes < 1.3 * across  # TCP's repetitions, answers and handshakes too
    assert max(rate for seconds, rate in spans if seconds > 0.05) < 150
    assert sum(seconds for seconds, rate in spans if rate < 5) > 1.2  # down
    assert rates[-1][1] == 0  # nobody sends any more
    assert max(ms for _, ms in round_trips) >= 40
    assert max(number for _, number in stalled) >= 1
    assert stalled[-1][1] == 0
    sends = [event for event in events if event["ph"] == "X" and event["name"].startswith("send")]
    assert min(at for at, rate in rates if rate > 20) < max(event["ts"] for event in sends) * 1e-6


#: Of the frames that `holmes-line` sends; then what is measured is about the machine.
_MOST_LATE = 0.25
_FOLLOWED_S = 5.0
_TOLD = re.compile(r"info: the path to host b0 over NIC eth0 carries (\d+) Mbit/s, before (\d+);")


def _change_while_it_runs(folder: Path, options: tuple[str, ...]) -> tuple[float, dict[str, Any]]:
    """Of the frames, the share that `holmes-line` sent late, and what rank 0 found, with what the logs told."""
    network = {"class": "ethernet", "uplink": {"rate_gbps": 0.1, "delay_ms": 10, "queue_ms": 50}}
    clusters = {name: {"nodes": 1, "nics": [{"name": "eth0", "network": "eth"}]} for name in "ab"}
    spec = parse_spec("changing", {"networks": {"eth": network}, "clusters": clusters})
    command = [sys.executable, str(WORKERS / "far_worker.py"), "changing", str(folder), *options]
    told, changed_s = [], []

    def listen(rank: int, _: str, line: str) -> None:
        if rank == 0:
            told.extend((time.monotonic(), int(now) / int(before)) for now, before in _TOLD.findall(line))

    with Testbed(spec).session() as session:
        job = session.launch(command, env={"HOLMES_LOG": "info"}, on_line=listen)
        until = time.monotonic() + 60
        while not (folder / "begun").exists() and time.monotonic() < until:
            time.sleep(0.05)
        before = session.line_counters()
        for rate_gbps in (0.05, 0.1):
            time.sleep(8)
            changed_s.append(time.monotonic())
            session.change_link("eth/a", rate_gbps=rate_gbps)
        time.sleep(11)
        late_share, _ = slowness(before, session.line_counters())
        (folder / "stop").touch()
        result = job.wait(60.0)
    lines = [line for lines in result.outputs.values() for line in lines]
    assert result.returncode == 0, lines
    (found,) = [json.loads(line) for line in lines if line.startswith("{")]
    return late_share, {**found, "changed_s": changed_s, "told": told}


@_on_a_quiet_machine
@needs_namespaces
# With a priority ("1",) or four streams ("-1", "4") it was not seen to pass yet: a round took longer than a window.
@pytest.mark.parametrize("options", [()], ids=["plain"])
def test_the_rate_of_an_uplink_halves_and_comes_back(options: tuple[str, ...], tmp_path: Path) -> None:
    """All is compared with what the link carried before in the same run: the machine is shared."""
    for attempt in range(3):
        (folder := tmp_path / str(attempt)).mkdir()
        late_share, found = _change_while_it_runs(folder, options)
        assert found["right"]
        if late_share < _MOST_LATE:
            break
    else:
        pytest.skip(f"the machine is too busy for the link: {100 * late_share:.0f} % of the frames were late")
    halved_s, returned_s = found["changed_s"]
    rounds = found["rounds"]

    def megabits(from_s: float, to_s: float) -> float:
        """Of the rounds that lie in between."""
        rates = [8e-6 * size / (end - start) for start, end, size, _ in rounds if from_s <= start and end <= to_s]
        return statistics.median(rates)

    full = megabits(halved_s - 5, halved_s)
    assert full > 40
    assert 0.75 * full / 2 < megabits(halved_s + 2, returned_s) < 0.65 * full
    assert megabits(returned_s + 5, returned_s + 11) > 0.75 * full
    # What it says of it: in connections(), within 5 s and a round, and in the log.
    for purpose in ("collective", "p2p"):
        for since_s, share in ((halved_s, 0.5), (returned_s, 1.0)):
            sums = [
                (sum(rate for one, rate, _ in paths if one == purpose), sum(n for one, _, n in paths if one == purpose))
                for _, end, _, paths in rounds
                if since_s < end < since_s + 7
            ]
            assert any(changes and 0.7 < 8e-6 * rate / (share * full) < 1.6 for rate, changes in sums), (purpose, sums)
    # Collectives and messages share the path: once for both.
    for since_s, turn in ((halved_s, -1), (returned_s, 1)):
        ratios = [ratio for at, ratio in found["told"] if since_s < at < since_s + _FOLLOWED_S]
        assert len(ratios) == 1, found["told"]
        assert ratios[0] ** turn > 1.4, found["told"]


def _follow(folder: Path) -> tuple[float, dict[str, Any]]:
    """Messages over 40 Mbit/s, 20 and 40 again: the share of late frames, and what rank 0 found, with what was told."""
    uplink = {"rate_gbps": 0.04, "delay_ms": 10, "loss_percent": 0.1, "queue_ms": 50}
    network = {"class": "ethernet", "uplink": uplink}
    clusters = {name: {"nodes": 1, "nics": [{"name": "eth0", "network": "eth"}]} for name in "ab"}
    told, changed_s = [], []

    def listen(_: int, __: str, line: str) -> None:
        told.extend((time.monotonic(), int(now) / int(before)) for now, before in _TOLD.findall(line))

    with Testbed(parse_spec("following", {"networks": {"eth": network}, "clusters": clusters})).session() as session:
        command = [sys.executable, str(WORKERS / "far_worker.py"), "following", str(folder)]
        job = session.launch(command, env={"HOLMES_LOG": "info"}, on_line=listen)
        job.processes[0].wait_for_line("far", 60.0)  # of its NIC: it connects
        before = session.line_counters()
        for rate_gbps in (0.02, 0.04):
            time.sleep(_FOLLOWED_S)
            changed_s.append(time.monotonic())
            session.change_link("eth/a", rate_gbps=rate_gbps)
        time.sleep(_FOLLOWED_S + 0.5)
        (folder / "stop").touch()
        result = job.wait(30.0)
        late_share, _ = slowness(before, session.line_counters())
    lines = [line for lines in result.outputs.values() for line in lines]
    assert result.returncode == 0, lines
    (found,) = [json.loads(line) for line in lines if line.startswith("{")]
    return late_share, {**found, "changed_s": changed_s, "told": told}


@_on_a_quiet_machine
@_needs_bbr
@needs_namespaces
def test_messages_follow_a_rate_that_halves_and_comes_back(tmp_path: Path) -> None:
    """Within 5 s, in spite of loss, and the engine says so."""
    for attempt in range(2):
        (folder := tmp_path / str(attempt)).mkdir()
        late_share, found = _follow(folder)
        assert found["right"]
        if late_share < _MOST_LATE:
            break
    else:
        pytest.skip(f"the machine is too busy for the link: {100 * late_share:.0f} % of the frames were late")

    def megabits(from_s: float, to_s: float) -> float:
        return 8e-6 * found["bytes"] * sum(from_s <= at < to_s for at in found["received_s"]) / (to_s - from_s)

    halved_s, returned_s = found["changed_s"]
    for changed_s, link, turn in ((halved_s, 20, -1), (returned_s, 40, 1)):
        assert 0.7 * link < megabits(changed_s + 2, changed_s + _FOLLOWED_S) < 1.1 * link
        followed = [8e-6 * rate for at, rate, _ in found["paths"] if changed_s + 2 < at < changed_s + _FOLLOWED_S]
        assert any(0.7 * link < rate < 1.4 * link for rate in followed), followed
        ratios = [ratio for at, ratio in found["told"] if changed_s < at < changed_s + _FOLLOWED_S]
        assert any(ratio**turn > 1.4 for ratio in ratios), found["told"]
    assert found["paths"][-1][2] >= 2


#: Prints to whom a rank sends in each small operation.
SMALL_OPERATIONS = """
import numpy as np, holmes_comm

comm = holmes_comm.init()
data = np.ones(4, "float32")
all_data = [np.zeros(4, "float32") for _ in range(4)]


def sent():
    peers = [0] * 4
    for connection in comm.connections():
        if connection["purpose"] == "collective":
            peers[connection["peer"]] += connection["sent_bytes"]
    return peers


def receivers(call):
    comm.barrier()
    before = sent()
    for _ in range(5):
        call()
    return [peer for peer in range(4) if sent()[peer] > before[peer]]


print("barrier", receivers(comm.barrier))
print("all_reduce", receivers(lambda: comm.all_reduce(data)))
print("all_gather", receivers(lambda: comm.all_gather(all_data, data)))
print("reduce_scatter", receivers(lambda: comm.reduce_scatter(data, all_data)))
"""


@needs_namespaces
def test_small_operations_take_one_trip() -> None:
    """In log2(n) steps each step would take the way of 20 ms."""
    with Testbed("far-clusters").session() as session:
        result = session.launch([sys.executable, "-c", SMALL_OPERATIONS]).wait(120.0)
    assert result.returncode == 0, result.outputs
    for rank, lines in result.outputs.items():
        others = [peer for peer in range(4) if peer != rank]
        names = ("barrier", "all_reduce", "all_gather", "reduce_scatter")
        assert [line for line in lines if line.startswith(names)] == [f"{name} {others}" for name in names]
