"""Communicators over real verbs: Soft-RoCE in user-mode Linux, one host with two ports and two hosts. `make test` runs
the first, `make test-rdma` all."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import rig
from paths import ROOT

WORKER = Path(__file__).parent / "rdma_worker.py"
TORCH_WORKER = WORKER.with_name("torch_rdma_worker.py")
CPP = next(iter(sorted((ROOT / "build").glob("cp*/tests/cpp/test_rdma"))), None)
PING = "ibv_rc_pingpong -g 1 -e -m 4096"

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("hosts")]
long = pytest.mark.skipif("HOLMES_TEST_RDMA" not in os.environ, reason="`make test-rdma` runs it")


def rank(check: str, number: int, size: int, nic: str, host: str = "127.0.0.1", **variables: str) -> str:
    """The shell command of one rank, whose output is kept apart."""
    given = {"HOLMES_SHM": "0", "HOLMES_LOG": "warn", **variables}
    words = " ".join(f"{name}={value}" for name, value in given.items())
    return f"{words} PYTHONPATH={ROOT} {sys.executable} {WORKER} {check} {number} {size} {host} 29500 {nic}"


def on_one_host(
    check: str,
    size: int = 2,
    before: str = "",
    prefix: str = "",
    ports: tuple[str, str] = ("rxe0", "rxe1"),
    **variables: str,
) -> str:
    """Output of a host on which all ranks run, on its two ports by turns."""
    ranks = [f"{prefix}{rank(check, number, size, ports[number % 2], **variables)}" for number in range(size)]
    started = "\n".join(f"{command} >/run/out{number} 2>&1 & p{number}=$!" for number, command in enumerate(ranks))
    waits = "\n".join(f"wait $p{number} || status=1; cat /run/out{number}" for number in range(size))
    (result,) = rig.run([f"status=0\n{before}\n{started}\n{waits}\nexit $status"], timeout_s=150)
    assert result.status == 0, result.output
    return result.output


def on_two_hosts(check: str, before: str = "", **variables: str) -> tuple[str, str]:
    """Outputs of two hosts with a rank each."""
    commands = [f"{before}\n{rank(check, number, 2, 'rxe0', '10.0.0.1', **variables)}" for number in range(2)]
    one, two = rig.run(commands, timeout_s=150)
    assert (one.status, two.status) == (0, 0), f"{one.output}\n---\n{two.output}"
    return one.output, two.output


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=long)])
def test_every_operation_on_one_host(size: int) -> None:
    assert on_one_host("everything", size).count("DONE") == size


@long
def test_every_operation_on_two_hosts() -> None:
    assert [text.count("DONE") for text in on_two_hosts("everything")] == [1, 1]


@long
def test_auto_takes_rdma_between_hosts() -> None:
    outputs = on_two_hosts("everything", RIG_TRANSPORT="auto", RIG_EXPECTED="rdma", HOLMES_LOG="info")
    for number, text in enumerate(outputs):
        assert "DONE" in text
        assert re.search(rf"rank {number} of 2 on vec0 \S+, RDMA over rxe0:1: .*; RDMA over roce 10.0.0.0/24", text), (
            text
        )


@long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", ["rdma", "auto"])
def test_a_torch_job_on_two_hosts(transport: str) -> None:
    """DDP's parameters are those of one process, and its gradients go by the HCA."""
    job = "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 WORLD_SIZE=2 OMP_NUM_THREADS=1"
    commands = [
        f"{job} RANK={number} HOLMES_LOG=warn PYTHONPATH={ROOT} {sys.executable} {TORCH_WORKER} {transport}"
        for number in range(2)
    ]
    for result in rig.run(commands, timeout_s=350):
        assert (result.status, result.output.count("DONE")) == (0, 1), result.output
        assert "USED [('rdma', 'rxe0:1')]" in result.output, result.output
        packets, moved = re.findall(r"PACKETS (\d+) for (\d+) bytes", result.output)[0]
        # An all_reduce of two ranks sends each what it has once; a packet holds 4096 bytes at most.
        assert int(packets) >= int(moved) / 4096, result.output


LITTLE_MEMORY = "setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock prlimit --memlock=65536 env "


@long
@pytest.mark.parametrize(
    ("prefix", "gid_index", "why"),
    [
        (LITTLE_MEMORY, "1", r"rank 1 \(host host2\): cannot register .* may lock 65536 bytes"),
        ("", "0", r"rank . \(host host.\): .*(not answer over RDMA|cannot be connected)"),
    ],
)
def test_auto_leaves_what_does_not_work_on_one_host(prefix: str, gid_index: str, why: str) -> None:
    """Too little memory, or a GID of an address that the other host cannot reach: all go on over TCP, told why."""
    given = {"RIG_TRANSPORT": "auto", "RIG_EXPECTED": "tcp", "HOLMES_LOG": "info", "HOLMES_RDMA_TIMEOUT": "16"}
    one = rank("everything", 0, 2, "rxe0", "10.0.0.1", HOLMES_RDMA_GID_INDEX="1", **given)
    two = prefix + rank("everything", 1, 2, "rxe0", "10.0.0.1", HOLMES_RDMA_GID_INDEX=gid_index, **given)
    for result in rig.run([one, two], timeout_s=150):
        assert (result.status, result.output.count("DONE")) == (0, 1), result.output
        assert re.search(f"uses TCP, not RDMA: {why}", result.output), result.output


@long
@pytest.mark.parametrize("transport", ["auto", "rdma"])
def test_inside_a_cluster_it_is_rdma_and_between_clusters_tcp(transport: str) -> None:
    """Ranks 0 and 1 of one cluster on two hosts, rank 2 of another one on the first host."""
    given = {"RIG_TRANSPORT": transport, "RIG_EXPECTED": "rdma"}
    zero, one, two = (
        rank("everything", number, 3, "rxe0", "10.0.0.1", RIG_CLUSTER="aab"[number], **given) for number in range(3)
    )
    first = f"{two} >/run/out 2>&1 & {zero}; status=$?; wait $! || status=1; cat /run/out; exit $status"
    results = rig.run([first, one], timeout_s=150)
    assert [result.status for result in results] == [0, 0], "\n---\n".join(result.output for result in results)
    assert [result.output.count("DONE") for result in results] == [2, 1]


@long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("delay_ms", [1, 10])
def test_every_operation_with_delay_and_loss(delay_ms: int) -> None:
    lossy = f"for i in va vb; do tc qdisc add dev $i root netem delay {delay_ms}ms loss 1% limit 50000; done"
    output = on_one_host("everything", before=lossy, HOLMES_RDMA_TIMEOUT="16")
    assert output.count("DONE") == 2


@long
@pytest.mark.parametrize("kernels", [1, 2])
def test_deadlines_aborts_and_kills(kernels: int) -> None:
    ports = ["rxe0", "rxe1" if kernels == 1 else "rxe0"]
    ranks = [rank("ends", number, 2, ports[number], "10.0.0.1", HOLMES_SPIN_US="0") for number in range(2)]
    commands = ranks if kernels == 2 else [f"{ranks[0]} >/run/out 2>&1 & {ranks[1]}; wait; cat /run/out"]
    results = rig.run(commands, timeout_s=150)
    outputs = "\n---\n".join(result.output for result in results)
    assert outputs.count("ENDED") == 1, outputs


@long
def test_nothing_is_left_of_many_communicators() -> None:
    """Nor of those of a killed process: no queue pair, no registered memory, no descriptor. (Each takes a second here;
    test_rdma.cpp makes a thousand.)"""
    shown = "rdma resource show"
    ranks = [rank("many", number, 2, f"rxe{number}", COUNT="40", HOLMES_SPIN_US="0") for number in range(2)]
    commands = f"{shown}; {ranks[0]} >/run/out0 2>&1 & {ranks[1]}; wait; cat /run/out0; {shown}"
    (result,) = rig.run([commands], timeout_s=200)
    assert result.output.count("MADE 40,") == 2, result.output
    assert "LOST rank 0 (host " in result.output, result.output
    shows = re.findall(r"^\d+: (rxe\d): (pd.*)", result.output, re.M)
    assert len(shows) == 4, result.output
    assert shows[:2] == shows[2:], shows


@long
def test_bench_compares_ports() -> None:
    words = (
        "ping_pong --transport rdma --ranks 2 --nics rxe0 --nics rxe1 --sizes 1K --peers none --seconds 0.1 --rounds 1"
    )
    command = (
        f"cd {ROOT} && ulimit -l unlimited && HOLMES_SHM=0 HOLMES_SPIN_US=0 {sys.executable} -m holmes bench {words}"
    )
    (result,) = rig.run([command], timeout_s=150)
    assert result.status == 0, result.output
    assert re.findall(r"1024 holmes\[(rxe.)\] +(\S+) ", result.output) == [("rxe0", "rdma"), ("rxe1", "rdma")]


@long
def test_the_engines_own_tests_over_verbs() -> None:
    if CPP is None:
        pytest.skip("no test_rdma; `make test-cpp` builds it")
    (result,) = rig.run(
        [f"HOLMES_SHM=0 HOLMES_TEST_RDMA_PORTS=rxe0:1,rxe1:1 LD_LIBRARY_PATH=$LD_LIBRARY_PATH {CPP}"], timeout_s=170
    )
    assert result.status == 0, result.output
    assert "2 ranks" in result.output


@long
def test_a_pulled_port_is_named() -> None:
    output = on_one_host("pulled", PULL="va", HOLMES_RDMA_TIMEOUT="16")
    told = re.findall(r"LOST after ([\d.]+) s: (.*)", output)
    assert len(told) == 2, output
    assert all(float(seconds) < 12 for seconds, _ in told), output
    assert any("rank 1" in text and "NIC rxe0:1 is lost" in text for _, text in told), output


# Two more ports of a host, rxe2 (10.0.1.1, interface vc) and rxe3.
MORE_PORTS = """
ip link add vc type veth peer name vd
for i in vc vd; do
  ip link set $i mtu 4200 up
  for n in accept_local=1 rp_filter=0 arp_ignore=1; do echo ${n#*=} >/proc/sys/net/ipv4/conf/$i/${n%=*}; done
done
ip addr add 10.0.1.1/24 dev vc; ip addr add 10.0.1.2/24 dev vd
rdma=$(ls $RIG_ROOT/bin/rdma $RIG_ROOT/usr/bin/rdma 2>/dev/null | head -1)
$rdma link add rxe2 type rxe netdev vc; $rdma link add rxe3 type rxe netdev vd
sleep 1
"""


@long
@pytest.mark.parametrize("pulled", ["va", "vc"])
def test_a_pulled_port_of_two_is_left(pulled: str) -> None:
    """Whichever carries the stream: all operations end right, and both ranks say which port is lost."""
    ports = ("rxe0 rxe2", "rxe1 rxe3")
    output = on_one_host("rails", before=MORE_PORTS, ports=ports, PULL=pulled, HOLMES_RDMA_TIMEOUT="16")
    assert output.count("DONE") == 2, output
    lost = ("rxe0:1", "rxe1:1") if pulled == "va" else ("rxe2:1", "rxe3:1")
    assert sorted(re.findall(r"LEFT (\S+)\n", output)) == sorted(lost), output
    for port in lost:
        assert re.search(rf"warn: .*lost the connection to rank \d \(host .*\) over NIC {port} ", output), output
    shares = re.search("SHARES (.*)", output)
    assert shares, output
    assert all(int(one.split()[1]) > 0 for one in shares[1].split(", ")), output


@long
def test_a_gid_of_another_kind_is_refused_with_its_fix() -> None:
    output = on_one_host("refused", HOLMES_RDMA_GID_INDEX="200")
    assert len(re.findall("REFUSED NicError: .*has no GID number 200", output)) == 2, output


@long
def test_an_mtu_that_the_port_lacks_is_refused() -> None:
    output = on_one_host("refused", before="ip link set va mtu 1500; ip link set vb mtu 1500", HOLMES_RDMA_MTU="4096")
    assert len(re.findall("REFUSED NicError: .*its active MTU is 1024", output)) == 2, output


@long
def test_the_smaller_of_two_mtus_is_used() -> None:
    """Larger packets would be lost: 4096 bytes do not pass where 1500 do."""
    assert on_one_host("everything", before="ip link set vb mtu 1500").count("DONE") == 2


@long
def test_too_little_locked_memory_is_told() -> None:
    output = on_one_host("refused", prefix=LITTLE_MEMORY)
    assert len(re.findall(r"REFUSED SystemError: .*may lock 65536 bytes \(ulimit -l\)", output)) == 2, output


@long
def test_rates_beside_verbs_own_tools() -> None:
    """What is printed goes into docs/rdma.md; how fast it is on a machine that does other things is no test."""
    pings = "\n".join(
        f"{PING} -d rxe1 -n {count} -s {size} >/dev/null 2>&1 &\nsleep 1\n"
        f"{PING} -d rxe0 -n {count} -s {size} 10.0.0.2 | tail -2; wait"
        for size, count in ((64, 1000), (1 << 20, 100))
    )
    # Processor time is counted in ticks of 10 ms there, so that polling for 150 us takes that long.
    over_rdma = on_one_host("rates", before=pings, HOLMES_SPIN_US="0")
    over_tcp = on_one_host("rates", HOLMES_SPIN_US="0", RIG_TRANSPORT="tcp")
    print(f"RDMA, behind ibv_rc_pingpong:\n{over_rdma}\nTCP:\n{over_tcp}")
    for output in (over_rdma, over_tcp):
        assert len(re.findall("^RATE ", output, re.M)) == 3
        (idle_s,) = re.findall(r"IDLE ([\d.]+) s", output)
        assert float(idle_s) < 1.5  # who polls uses 3 s; on a busy machine a tick is charged for less than one
