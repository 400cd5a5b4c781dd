"""perftest beside Holmes in `holmes bench`: its output, its processes when a side fails, and what is said where it is
missing. tests/rdma runs the real tools."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import holmes_comm
from holmes.tools.bench import OPERATIONS, Case, Context, Control, PeerError, Settings, measure
from holmes.tools.bench.operations import DTYPES
from holmes.tools.bench.peer import SelfTimedPeer
from holmes.tools.bench.peer_perftest import (
    NoClockError,
    PerftestPeer,
    ToolError,
    bandwidth_call_s,
    latency_calls_s,
)
from holmes.tools.bench.tables import Table, row
from holmes.tools.bench.timing import RoundTimes

BANDWIDTH = """---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF		Device         : rxe0
 Number of qps   : 1		Transport type : IB
 Connection type : RC		Using SRQ      : OFF
 PCIe relax order: ON
 ibv_wr* API     : OFF
 TX depth        : 20
 CQ Moderation   : 1
 Mtu             : 4096[B]
 Link type       : Ethernet
 GID index       : 1
 Max inline data : 0[B]
 rdma_cm QPs	 : OFF
 Data ex. method : Ethernet
---------------------------------------------------------------------------------------
 local address: LID 0000 QPN 0x0011 PSN 0xc6cee RKey 0x00026c VAddr 0x0000004070a000
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:00:00:01
 remote address: LID 0000 QPN 0x0011 PSN 0x23afae RKey 0x0002b1 VAddr 0x0000004070a000
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:00:00:02
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 1048576    20               0.00               674.99 		   0.000675
---------------------------------------------------------------------------------------
"""
LATENCY = """---------------------------------------------------------------------------------------
                    RDMA_Write Latency Test
 Dual-port       : OFF		Device         : rxe0
 Number of qps   : 1		Transport type : IB
 Connection type : RC		Using SRQ      : OFF
 PCIe relax order: OFF
 ibv_wr* API     : OFF
 TX depth        : 1
 Mtu             : 4096[B]
 Link type       : Ethernet
 GID index       : 1
 Max inline data : 0[B]
 rdma_cm QPs	 : OFF
 Data ex. method : Ethernet
---------------------------------------------------------------------------------------
 local address: LID 0000 QPN 0x0013 PSN 0xbae79a RKey 0x00048a VAddr 0x0000552aaf0000
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:00:00:01
 remote address: LID 0000 QPN 0x0013 PSN 0x4d1ce6 RKey 0x000417 VAddr 0x0000552aaf1000
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:00:00:02
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] 
#, usec
1, 6309.68
2, 9974.6
3, 9994.62
4, 9995.92
5, 9998.08
6, 9997.95
7, 10008.1
8, 10006
9, 9970.58
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] 
 64      10          6309.68        10006.01      9994.62  	       9463.06     	1287.08		10006.01 		10006.01
---------------------------------------------------------------------------------------
"""  # noqa: E501 (as it is printed)


def bandwidth(size_bytes: int, calls: int, numbers: str) -> str:
    """As above, of another run."""
    return re.sub(r"^ 1048576 .*$", f" {size_bytes} {calls} {numbers}", BANDWIDTH, flags=re.MULTILINE)


def test_the_time_of_a_write_is_read() -> None:
    assert bandwidth_call_s(BANDWIDTH, 1048576, 20) == pytest.approx(1 / 674.99)
    # Where mebibytes are too coarse the rate counts; of long messages these.
    coarse, fine = bandwidth(64, 1000, "0.00 0.06 0.001049"), bandwidth(9437184, 5, "0.00 372.16 \t\t 0.000041")
    assert bandwidth_call_s(coarse, 64, 1000) == pytest.approx(1e-6 / 0.001049)
    assert bandwidth_call_s(fine, 9437184, 5) == pytest.approx(9 / 372.16)
    # Newer ones print what it means.
    assert bandwidth_call_s(BANDWIDTH.replace("MB/sec", "MiB/sec"), 1048576, 20) == pytest.approx(1 / 674.99)


def test_round_trips_are_read() -> None:
    times_s = latency_calls_s(LATENCY, 64, 10)
    assert len(times_s) == 9
    assert (times_s[0], times_s[-1]) == (pytest.approx(2 * 6309.68e-6), pytest.approx(2 * 9970.58e-6))


@pytest.mark.parametrize("end", [0.3, 0.9, 0.99])
def test_what_is_cut_short_is_no_result(end: float) -> None:
    for output, read, size_bytes, calls in (
        (BANDWIDTH, bandwidth_call_s, 1048576, 20),
        (LATENCY, latency_calls_s, 64, 10),
    ):
        result = output.rindex(str(size_bytes))
        with pytest.raises(ToolError, match=r"printed no result of|printed . times"):
            read(output[: int(result * end)], size_bytes, calls)


def test_another_size_or_count_is_no_result() -> None:
    with pytest.raises(ToolError, match="no result of 21 times 1048576 B, but: "):
        bandwidth_call_s(BANDWIDTH, 1048576, 21)
    with pytest.raises(ToolError, match="no result of 10 times 65 B, but: "):
        latency_calls_s(LATENCY, 65, 10)
    with pytest.raises(ToolError, match="no result of"):
        bandwidth_call_s(BANDWIDTH.replace("MB/sec", "Gb/sec"), 1048576, 20)


def test_a_missing_clock_is_named() -> None:
    """As perftest prints it where /proc/cpuinfo has no 'cpu MHz'."""
    with pytest.raises(NoClockError, match=r"told 0.0 MiB/s: .*cpu MHz.*/proc/cpuinfo"):
        bandwidth_call_s(bandwidth(64, 6, "0.00 0.00 0.000000"), 64, 6)
    with pytest.raises(NoClockError, match=r"told inf us: .*cpu MHz.*/proc/cpuinfo"):
        latency_calls_s(re.sub(r"^(\d+), .*", r"\1, inf", LATENCY, flags=re.MULTILINE), 64, 10)


def case(name: str, rank: int, ranks: int = 2, size_bytes: int = 64) -> Case:
    return Case(OPERATIONS[name], size_bytes, DTYPES["float32"], "sum", rank, ranks)


def on_two_ranks(body) -> list[object]:
    """What the body returned or raised on each rank; it has rank and store."""
    store = holmes_comm.LocalStore()
    ended: list[object] = [None, None]

    def run(rank: int) -> None:
        try:
            ended[rank] = body(rank, store)
        except Exception as error:
            ended[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    ended = on_two_ranks(lambda rank, store: PerftestPeer(None).setup(Context(rank, 2, store, 10.0)))
    for error in ended:
        assert isinstance(error, PeerError)
        assert re.search(
            r"perftest: rank 0 has no ib_write_bw and no ib_write_lat on PATH; install the package perftest \(apt ",
            str(error),
        )


def test_what_it_does_not_do_is_said() -> None:
    peer = PerftestPeer("mlx5_0:1")
    assert peer.name == "perftest[mlx5_0:1]"
    peer.setup(Context(0, 3, None, 10.0))  # asks nobody
    assert peer.unsupported(case("all_reduce", 0)) == "it has send (ib_write_bw) and ping_pong (ib_write_lat) only"
    assert peer.unsupported(case("send", 0, 3)) == "it is between 2 ranks, here are 3"
    peer._most_bytes = 8 << 20
    assert peer.unsupported(case("send", 0, size_bytes=8 << 20)) is None
    assert peer.unsupported(case("send", 0, size_bytes=9 << 20)) == "a message has 8388608 B at most there"


class Counted(SelfTimedPeer):
    """Calls take a tenth of a millisecond."""

    name = "counted"

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def setup(self, context: Context) -> None:
        pass

    def time_round(self, case: Case, calls: int) -> RoundTimes:
        self.rounds.append(calls)
        singles = [1e-4, 3e-4] if case.operation.name == "ping_pong" else []
        return RoundTimes(np.array([1e-4]), np.array(singles))

    def teardown(self) -> None:
        pass


@pytest.mark.parametrize("name", ["send", "ping_pong"])
def test_what_times_itself_has_a_line_and_a_row(name: str) -> None:
    settings = Settings((name,), rounds=2, seconds=0.2, warmup=1)
    peers = [Counted(), Counted()]

    def body(rank: int, store: holmes_comm.LocalStore) -> object:
        return measure(case(name, rank), [peers[rank]], Control(store, rank, 2), settings)

    (measurement,), _ = on_two_ranks(body)  # type: ignore[misc]
    assert peers[0].rounds == peers[1].rounds
    assert peers[0].rounds[-2:] == [1000, 1000]
    written = row(measurement)
    assert (written["calls"], written["time_us"]) == (2000, pytest.approx(100))
    assert written["p50_us"] == (pytest.approx(200) if name == "ping_pong" else None)
    assert [written[key] for key in ("wrong_elements", "cores", "gb_per_core_s", "foreign_cores")] == [None] * 4
    table = Table({"counted": "rdma"}, [])
    names = table.header(measurement.case).splitlines()[2].lstrip("#").split()
    shown = dict(zip(names, table.line(measurement).split(), strict=True))
    assert (shown["time"], shown["path"], shown["#wrong"], shown["cpu"]) == ("100.0", "rdma", "-", "-")


# The client's last word is an address, the server's its port. Both leave their process's number.
TOOL = """#!{python}
import os, pathlib, socket, sys, time
words = sys.argv[1:]
is_client = not words[-1].isdigit()
place = int(words[words.index("--port") + 1])
pathlib.Path(__file__).with_name(f"{{'client' if is_client else 'server'}}.{{os.getpid()}}").touch()
if not is_client and "{server}" == "fails":
    sys.exit("the server has no HCA")
if is_client:
    line = socket.create_connection((words[-1], place))
    if "{client}" == "fails":
        sys.exit("Couldn't do it")
else:
    door = socket.create_server(("127.0.0.1", place))
    line = door.accept()[0]
    if "{server}" == "dies":
        sys.exit("the HCA is gone")
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("server", "client", "limit_s", "words"),
    [
        ("waits", "fails", 60.0, "rank 0: ib_write_lat ended with status 1: Couldn't do it"),
        ("dies", "waits", 60.0, "rank 1: ib_write_lat ended with status 1: the HCA is gone"),
        ("fails", "waits", 60.0, "rank 1: ib_write_lat ended with status 1: the server has no HCA"),
        ("waits", "waits", 3.0, "rank [01]: ib_write_lat did not end within 3 s"),
    ],
)
def test_nothing_runs_on_when_a_side_fails(
    server: str, client: str, limit_s: float, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "ib_write_lat"
    tool.write_text(TOOL.format(python=sys.executable, server=server, client=client))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def body(rank: int, store: holmes_comm.LocalStore) -> object:
        peer = PerftestPeer(None)
        peer._context = Context(rank, 2, store, limit_s)
        peer._facts = {"port": "mlx5_0:1", "gid_index": 3}
        peer._address = "127.0.0.1:40000"
        return peer.time_round(case("ping_pong", rank), 10)

    begin_s = time.monotonic()
    ended = on_two_ranks(body)
    assert time.monotonic() - begin_s < 50  # it sleeps for 600 s
    for error in ended:
        assert isinstance(error, PeerError), error
        assert re.search(rf"^perftest, ping_pong of 64 B: .*{words}", str(error)), error
    assert str(ended[0]) == str(ended[1])
    started = [int(one.suffix[1:]) for one in tmp_path.glob("*.[0-9]*")]
    assert len(started) == (1 if server == "fails" else 2)
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
