"""The emulated testbed: real namespaces, links and processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import child_env, needs_namespaces, unprivileged_python
from running import processes_with

from holmes.lab.testbed import SpecError, Testbed, TestbedError
from holmes.lab.testbed.launch import TestbedSession
from holmes.lab.testbed.spec import parse_spec

PYTHON = sys.executable


def _holmes(*args: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    # A suite that runs in the background has SIGINT ignored, and its children with it.
    return subprocess.Popen(
        [PYTHON, "-m", "holmes", "testbed", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env or child_env(),
        cwd="/",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _wait_for_processes(marker: str, *, at_least: int = 0, at_most: int | None = None, timeout_s: float = 30.0) -> int:
    deadline_s = time.monotonic() + timeout_s
    while True:
        count = len(processes_with(marker))
        if (count >= at_least and (at_most is None or count <= at_most)) or time.monotonic() > deadline_s:
            return count
        time.sleep(0.05)


@pytest.fixture(scope="module")
def clusters() -> Iterator[TestbedSession]:
    with Testbed("two-clusters").session() as session:
        yield session


# Ranks and nodes


@needs_namespaces
def test_each_rank_has_torchruns_environment(clusters: TestbedSession) -> None:
    code = "import json, os, socket; print(json.dumps({**os.environ, 'host': socket.gethostname()}))"
    result = clusters.launch([PYTHON, "-c", code], nproc_per_node=2, env={"EXTRA": "x"}).wait(20)
    assert result.returncode == 0
    assert result.failures == ()
    seen = [json.loads(result.outputs[rank][0]) for rank in range(8)]
    assert [env["RANK"] for env in seen] == [str(rank) for rank in range(8)]
    assert [env["LOCAL_RANK"] for env in seen] == ["0", "1"] * 4
    assert [env["NODE_RANK"] for env in seen] == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert [env["host"] for env in seen] == ["a0", "a0", "a1", "a1", "b0", "b0", "b1", "b1"]
    common = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500", "MASTER_ADDR": "10.12.0.1"}
    common |= {"GLOO_SOCKET_IFNAME": "eth0", "HOLMES_TESTBED": "1", "EXTRA": "x"}
    for env in seen:
        assert {key: env[key] for key in common} == common
        assert env["HOLMES_HOSTNAME"] == env["host"]
        assert "OMP_NUM_THREADS" in env


@needs_namespaces
def test_node_looks_like_a_machine_of_its_own(clusters: TestbedSession) -> None:
    root = "$HOLMES_SYSFS_ROOT"
    script = f"""
        cat {root}/class/infiniband/mlx5_0/ports/1/link_layer {root}/class/net/*/speed
        touch /dev/shm/mark-$(hostname) && ls /dev/shm
        getent hosts a1 | cut -d' ' -f1
    """
    a0 = clusters.exec("a0", ["sh", "-c", script]).split()
    b0 = clusters.exec("b0", ["sh", "-c", script]).split()
    assert a0[0] == "InfiniBand"
    assert b0[0] == "Ethernet"  # RoCE's link layer
    assert {"1000", "100"} <= set(a0)
    assert "mark-a0" in a0
    assert "mark-a0" not in b0
    assert a0[-1] == b0[-1] == "10.12.0.2"
    assert not list(Path("/dev/shm").glob("mark-a0"))


@needs_namespaces
@pytest.mark.skipif(
    not Path("/proc/sys/net/core/rps_default_mask").exists(), reason="needs Linux 6.3 (net.core.rps_default_mask)"
)
def test_one_processor_receives_a_connection(clusters: TestbedSession) -> None:
    """Else packets of an emulated link overtake each other, and TCP takes them for lost."""
    read = "cat /proc/sys/net/core/rps_default_mask; cat /sys/class/net/ib0/queues/rx-0/rps_cpus || :"
    masks = clusters.exec("a0", ["sh", "-c", read]).split()
    assert masks  # of the node and, where the node may mount a /sys of its own, of its NIC
    for mask in masks:
        assert int(mask.replace(",", ""), 16) == sum(1 << cpu for cpu in os.sched_getaffinity(0))


@needs_namespaces
def test_stray_output_forms(clusters: TestbedSession) -> None:
    code = r"import sys; sys.stdout.write('10%\r100%\nlast \xff'); sys.stdout.flush()"
    job = clusters.launch([PYTHON, "-X", "utf8=0", "-c", code])
    assert job.wait(10).outputs[0][0] == "100%"
    assert job.processes[0].lines[1].startswith("last ")


# The network


def _dial(session: TestbedSession, node: str, address: str) -> str:
    code = f"import socket\ntry: socket.create_connection(({address!r}, 1), 2)\nexcept OSError as e: print(e.errno)"
    return session.exec(node, [PYTHON, "-c", code])


@needs_namespaces
def test_fabrics_reach_their_own_members_only(clusters: TestbedSession) -> None:
    spec = clusters.spec
    refused, unreachable = "111", "101"  # ECONNREFUSED proves that the node answered
    assert refused in _dial(clusters, "a0", str(spec.node("a1").nic("ib0").address.ip))
    assert refused in _dial(clusters, "b1", str(spec.node("b0").nic("roce0").address.ip))
    assert refused in _dial(clusters, "a0", str(spec.node("b1").nic("eth0").address.ip))
    assert unreachable in _dial(clusters, "a0", str(spec.node("b0").nic("roce0").address.ip))
    assert unreachable in _dial(clusters, "b0", str(spec.node("a0").nic("ib0").address.ip))


@needs_namespaces
def test_nothing_routes_between_fabrics_even_when_asked(clusters: TestbedSession) -> None:
    # b0 hands packets for a1's InfiniBand-like address to a0, which is on both networks and must not forward.
    clusters.exec("b0", ["ip", "route", "add", "10.10.0.0/16", "via", "10.12.0.1"])
    code = (
        "import socket\ntry: socket.create_connection(('10.10.0.2', 1), 1)\nexcept TimeoutError as e: print('silence')"
    )
    output = clusters.exec("b0", [PYTHON, "-c", code])
    clusters.exec("b0", ["ip", "route", "del", "10.10.0.0/16"])
    assert output.strip() == "silence"


# Takes 20 MB, then more than its buffers may hold already; each read within 5 s.
_COUNTER = """
import socket, sys
with socket.create_server((sys.argv[1], 7777)) as server:
    server.settimeout(10)
    print("listening")
    taker = server.accept()[0]
taker.settimeout(5)
for goal, done in ((20_000_000, "full"), (10_000_000, "enough")):
    while goal > 0:
        goal -= len(taker.recv(1 << 16))
    print(done)
"""


@needs_namespaces
def test_a_link_goes_down_and_up_during_a_run() -> None:
    with Testbed("pair").session() as session:
        session.set_link("a0", "eth0", up=False)
        address = str(session.spec.node("a1").nic("eth0").address.ip)
        assert "101" in _dial(session, "a0", address)
        session.set_link("a0", "eth0", up=True)
        assert "111" in _dial(session, "a0", address)
        with pytest.raises(SpecError, match="node a0 has no NIC 'ib7'; it has eth0"):
            session.set_link("a0", "ib7", up=False)


@needs_namespaces
def test_a_full_link_that_becomes_slow_goes_on() -> None:
    """What waits in its queue was made for the larger bucket of the faster link."""
    pump = (
        "import socket, sys\n"
        "link = socket.create_connection((sys.argv[1], 7777))\n"
        "while True: link.send(bytes(1 << 20))"
    )
    with Testbed("pair").session() as session:
        address = str(session.spec.node("a1").nic("eth0").address.ip)
        sink = session.spawn("a1", [PYTHON, "-uc", _COUNTER, address])
        sink.wait_for_line("listening", 5)
        session.spawn("a0", [PYTHON, "-c", pump, address])
        sink.wait_for_line("full", 10)
        session.set_rate("a0", "eth0", 0.04)
        assert sink.wait(15) == 0, f"the link carries nothing any more: {sink.lines}"


# Failures and teardown


@needs_namespaces
def test_result_names_the_rank_that_failed_first(clusters: TestbedSession) -> None:
    script = "case $RANK in 2) exit 7;; 1) sleep 0.5; exit 9;; 3) sleep 60;; esac"
    result = clusters.launch(["sh", "-c", script]).wait(30, grace_s=1.0)
    assert result.returncode == 7
    assert [(f.rank, f.node, f.returncode) for f in result.failures] == [(2, "b0", 7), (1, "a1", 9)]
    assert str(result.failures[0]) == "rank 2 on b0 ended with exit code 7"
    assert result.duration_s < 15


@needs_namespaces
def test_killed_rank_is_reported_with_its_signal(clusters: TestbedSession) -> None:
    job = clusters.launch(["sh", "-c", "echo up; exec sleep 60"])
    job.processes[1].wait_for_line("up", 10)
    job.processes[1].kill()
    result = job.wait(30, grace_s=0.2)
    assert result.returncode == 128 + signal.SIGKILL
    assert str(result.failures[0]) == "rank 1 on a1 was ended by SIGKILL"


@needs_namespaces
def test_timeout_ends_all_ranks_and_what_they_started(clusters: TestbedSession) -> None:
    marker = f"holmes-test-{uuid.uuid4().hex}"
    script = f"{PYTHON} -c 'import time; time.sleep(60)' {marker} & wait"
    result = clusters.launch(["sh", "-c", script]).wait(0.5)
    assert result.timed_out
    assert result.returncode == 124
    assert result.failures == ()
    assert _wait_for_processes(marker, at_most=0) == 0


@needs_namespaces
def test_unknown_program_fails_as_in_a_shell(clusters: TestbedSession) -> None:
    result = clusters.launch(["no-such-program"]).wait(10)
    assert result.returncode == 127
    assert any("no-such-program" in line for line in result.outputs[0])


@needs_namespaces
def test_error_in_a_callback_reaches_the_caller() -> None:
    def on_line(rank: int, node: str, line: str) -> None:
        raise RuntimeError(f"no room for {line}")

    with pytest.raises(RuntimeError, match="no room for hello"):
        Testbed("pair").run(["echo", "hello"], on_line=on_line, timeout_s=10)


@needs_namespaces
def test_command_line_prefixes_lines_and_returns_the_exit_code() -> None:
    with _holmes("run", "--spec", "pair", "--", "sh", "-c", "echo hello; test $RANK = 0 || exit 5") as process:
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 5
    assert sorted(output.splitlines()) == ["[a0/rank 0] hello", "[a1/rank 1] hello"]
    assert "first failure: rank 1 on a1 ended with exit code 5" in errors


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_command_line_is_ended(number: signal.Signals) -> None:
    marker = f"holmes-test-{uuid.uuid4().hex}"
    stubborn = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; time.sleep(60)"
    script = f"{PYTHON} -c '{stubborn}' {marker} & wait"
    mounts = Path("/proc/self/mounts").read_text()
    with _holmes("run", "--spec", "pair", "--", "sh", "-c", script) as process:
        assert _wait_for_processes(marker, at_least=5) >= 5  # holmes itself, a shell and a Python on each node
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    assert _wait_for_processes(marker, at_most=0) == 0
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    if number == signal.SIGINT:
        assert "interrupted; all ranks were ended" in errors
    assert Path("/proc/self/mounts").read_text() == mounts
    assert not Path("/run/holmes").exists()


@needs_namespaces
def test_death_of_the_first_process_is_reported() -> None:
    with Testbed("pair").session() as session:
        job = session.launch(["sleep", "60"])
        assert session._agent is not None
        session._agent.kill()
        with pytest.raises(TestbedError, match="ended"):
            job.wait(10)


@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="the whole suite already runs unprivileged")
def test_works_for_an_unprivileged_user() -> None:
    run = [*unprivileged_python(), "-m", "holmes", "testbed", "run"]
    command = [*run, "--spec", "pair", "--", "sh", "-c", "hostname; id -u"]
    done = subprocess.run(command, env=child_env(), cwd="/", capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[a0/rank 0] 0", "[a0/rank 0] a0", "[a1/rank 1] 0", "[a1/rank 1] a1"]


def test_forbidden_user_namespaces_are_explained(tmp_path: Path) -> None:
    fake = tmp_path / "unshare"
    fake.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    fake.chmod(0o755)
    env = {**child_env(), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    with _holmes("run", "--spec", "pair", "--", "true", env=env) as process:
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "unshare failed: Operation not permitted" in errors
    assert "What to do:" in errors
    assert output == ""


@needs_namespaces
def test_congestion_control_is_set_or_refused() -> None:
    data = {
        "congestion_control": "reno",
        "networks": {"eth": {"class": "ethernet", "rate_gbps": 1}},
        "clusters": {"n": {"nodes": 1, "nics": [{"name": "eth0", "network": "eth"}]}},
    }
    with Testbed(parse_spec("reno", data)).session() as session:
        assert session.exec("n0", ["cat", "/proc/sys/net/ipv4/tcp_congestion_control"]) == "reno"
    data["congestion_control"] = "no-such"
    with pytest.raises(TestbedError, match=r"node n0: congestion_control no-such is not allowed here, only: .*reno"):
        Testbed(parse_spec("bad", data)).run(["true"])


@needs_namespaces
def test_each_rank_has_its_log_file(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "7.log").write_text("of an earlier, larger job")
    (logs / "notes.log").write_text("somebody's")
    command = [sys.executable, "-m", "holmes", "testbed", "run", "--spec", "pair", "--log-dir", str(logs), "--"]
    script = "echo out $RANK; echo err $RANK >&2"
    run = subprocess.run([*command, "sh", "-c", script], capture_output=True, text=True, env=child_env())
    assert run.returncode == 0, run.stderr
    assert sorted(path.name for path in logs.iterdir()) == ["0.log", "1.log", "notes.log"]
    for rank in range(2):
        assert sorted((logs / f"{rank}.log").read_text().splitlines()) == [f"err {rank}", f"out {rank}"]
        assert f"rank {rank}] out {rank}" in run.stdout
