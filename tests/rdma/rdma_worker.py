"""One rank of a communicator over RDMA: `rdma_worker.py CHECK RANK SIZE HOST PORT [NIC ...]`; rank 0 serves the store.

CHECK: everything (every operation against numpy), rates (round trips and bandwidth), pulled (rank 0 takes the interface
PULL down in the middle), rails (the same with two ports, of which the other one is left), refused (prints the error of
the set-up). With RIG_CLUSTER, ranks of one cluster must use RDMA with each other and TCP with the rest.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import holmes_comm
from holmes_comm import NicSelection, errors

COUNTS = (1, 13, 1021, 16385, 300007)
MIB = 1 << 20


def values(rank: int, count: int, dtype: str) -> np.ndarray:
    return (np.arange(count) * (rank + 1) % 97).astype(dtype)


def check_everything(comm: holmes_comm.Communicator) -> None:
    ranks = range(comm.size)
    for dtype in ("float32", "int64", "uint8", "float16"):
        for count in COUNTS:
            mine = values(comm.rank, count, dtype)
            total = np.sum([values(rank, count, "float64") for rank in ranks], axis=0)
            if dtype != "uint8":
                np.testing.assert_array_equal(summed(comm, mine.copy()), total.astype(dtype))
            outputs = [np.zeros(count, dtype) for _ in ranks]
            comm.all_gather(outputs, mine)
            for rank in ranks:
                np.testing.assert_array_equal(outputs[rank], values(rank, count, dtype))
            moved = [np.zeros(count, dtype) for _ in ranks]
            comm.all_to_all(moved, [values(10 * comm.rank + rank, count, dtype) for rank in ranks])
            for rank in ranks:
                np.testing.assert_array_equal(moved[rank], values(10 * rank + comm.rank, count, dtype))
            for root in ranks:
                shown = values(root, count, dtype) if comm.rank == root else np.zeros(count, dtype)
                comm.broadcast(shown, root)
                np.testing.assert_array_equal(shown, values(root, count, dtype))
            around = np.zeros(count, dtype)
            work = comm.recv(around, (comm.rank - 1) % comm.size, async_op=True)
            comm.send(mine, (comm.rank + 1) % comm.size)
            work.wait()
            np.testing.assert_array_equal(around, values((comm.rank - 1) % comm.size, count, dtype))
            comm.barrier()
    for number in range(300):
        small = np.full(3, number, "int32")
        assert summed(comm, small)[0] == number * comm.size
    halves = comm.split(comm.rank % 2, comm.rank)
    assert halves is not None
    assert summed(halves, np.ones(1000, "int32"))[0] == halves.size
    try:
        comm.all_reduce(np.zeros(5 + comm.rank, "int32"))
    except errors.MismatchError:
        return
    raise AssertionError("a mismatch was not noticed")


def summed(comm: holmes_comm.Communicator, array: np.ndarray) -> np.ndarray:
    comm.all_reduce(array)
    return array


def check_rates(comm: holmes_comm.Communicator) -> None:
    peer = 1 - comm.rank
    for count, rounds in ((64, 1000), (MIB, 100)):
        data = np.ones(count, "uint8")
        comm.barrier()
        for timed in (False, True):
            start = time.perf_counter()
            for _ in range(rounds if timed else 10):
                for sender in (0, 1):
                    if comm.rank == sender:
                        comm.send(data, peer)
                    else:
                        comm.recv(data, peer)
            seconds = time.perf_counter() - start
        if comm.rank == 0:
            rate_gbps = 2 * count * rounds * 8 / seconds / 1e9
            print(f"RATE {count} bytes: {seconds / rounds * 1e6:.1f} us a round, {rate_gbps:.3f} Gbit/s")
    data = np.ones(MIB // 4, "float32")
    comm.barrier()
    start = time.perf_counter()
    for _ in range(50):
        comm.all_reduce(data)
    if comm.rank == 0:
        print(f"RATE all_reduce of 1 MiB: {50 * MIB * 8 / (time.perf_counter() - start) / 1e9:.3f} Gbit/s")
    # Who waits asleep costs no processor time.
    if comm.rank == 0:
        time.sleep(3)
    before = time.process_time()
    comm.barrier()
    if comm.rank == 1:
        print(f"IDLE {time.process_time() - before:.3f} s of processor time in 3 s")


def check_pulled(comm: holmes_comm.Communicator) -> None:
    data = np.ones(100_000, "float32")
    start = time.monotonic()
    try:
        for number in range(100):
            if number == 10 and comm.rank == 0:
                subprocess.run(["ip", "link", "set", os.environ["PULL"], "down"], check=True)
                start = time.monotonic()
            comm.all_reduce(data, timeout_s=30.0)
    except errors.PeerLostError as error:
        print(f"LOST after {time.monotonic() - start:.1f} s: {error}")
        return
    raise AssertionError("a pulled port was not noticed")


def check_rails(comm: holmes_comm.Communicator) -> None:
    """100 operations, half of them of 4 MiB and straight from memory to memory, and messages both ways."""
    peer = 1 - comm.rank
    for number in range(100):
        if number == 30 and comm.rank == 0:
            shares = [f"{one['interface']} {one['received_bytes']}" for one in data_connections(comm)]
            print(f"SHARES {', '.join(shares)}")
            subprocess.run(["ip", "link", "set", os.environ["PULL"], "down"], check=True)
        count = MIB if number % 2 else 1000 + number
        data = summed(comm, np.full(count, number + comm.rank, "float32"))
        assert (data == 2 * number + 1).all(), number
        arriving = np.zeros(count, "float32")
        work = comm.recv(arriving, peer, async_op=True)
        comm.send(np.full(count, number + comm.rank, "float32"), peer)
        work.wait()
        assert (arriving == number + peer).all(), number
    left = {one["interface"] for one in data_connections(comm) if one["retired"]}
    print(f"LEFT {' '.join(sorted(left))}")


def check_transports(comm: holmes_comm.Communicator, store: holmes_comm.TcpStore, expected: str) -> None:
    cluster = os.environ.get("RIG_CLUSTER", "none")
    store.set(f"cluster/{comm.rank}", cluster.encode())
    for one in data_connections(comm):
        is_inside = store.get(f"cluster/{one['peer']}").decode() == cluster
        assert one["transport"] == (expected if is_inside else "tcp"), one


def check_ends(comm: holmes_comm.Communicator, make: Callable[[str], holmes_comm.Communicator]) -> None:
    """A deadline, an abort, an early end and a kill, each told of the rank whose it was."""

    def told(call: Callable[[], object], kind: type[errors.HolmesError], *words: str) -> None:
        said = ""
        try:
            call()
        except kind as error:
            said = str(error)
        assert all(word in said for word in words), (words, said)

    data, peer = np.ones(MIB), 1 - comm.rank
    late = make("late")
    if comm.rank == 0:
        told(lambda: late.recv(data, 1, timeout_s=1.0), errors.TimeoutError, "rank 1 (host")
    else:
        told(lambda: late.all_reduce(data), errors.HolmesError, "rank 0 (host")
    aborted = make("aborted")
    summed(aborted, data)
    if comm.rank == 1:
        time.sleep(0.5)
        aborted.abort("on purpose")
    else:
        told(lambda: [summed(aborted, data) for _ in range(10_000)], errors.AbortedError, "rank 1 (host", "on purpose")
    left = [make("left")]
    summed(left[0], data)
    if comm.rank == 0:
        told(lambda: left[0].recv(data, 1), errors.PeerLostError, "rank 1 (host", "destroyed its communicator")
    left.clear()
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told(lambda: [summed(comm, data) for _ in range(10_000)], errors.PeerLostError, f"rank {peer} (host", "is lost")
    print("ENDED")


def check_many(comm: holmes_comm.Communicator, make: Callable[[str], holmes_comm.Communicator]) -> None:
    """What the process holds does not grow with the communicators that it made."""
    held = []
    for number in range(int(os.environ["COUNT"])):
        other = make(f"number{number}")
        assert (summed(other, np.full(100, other.rank, "int64")) == 1).all()
        if number % 10 == 0:
            assert (summed(other, np.full(MIB, other.rank, "uint8")) == 1).all()
        del other
        if number % 20 == 19:
            comm.barrier()
            status = Path("/proc/self/status").read_text()
            held.append((len(os.listdir("/proc/self/fd")), re.findall(r"VmPin:\s+(\d+)", status)))
    assert held[0] == held[-1], held
    print(f"MADE {number + 1}, {held[-1]}", flush=True)
    comm.barrier()
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.barrier(timeout_s=20.0)
    except errors.PeerLostError as error:
        print(f"LOST {error}")


def data_connections(comm: holmes_comm.Communicator) -> list[dict[str, Any]]:
    return [one for one in comm.connections() if one["purpose"] != "control"]


def main() -> None:
    check, rank, size, host, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
    transport = os.environ.get("RIG_TRANSPORT", "rdma")
    nics = NicSelection(names=tuple(sys.argv[6:]), max_rails=max(len(sys.argv[6:]), 1), transport=transport)
    store = holmes_comm.TcpStore(host, port, is_server=rank == 0)
    cluster = os.environ.get("RIG_CLUSTER")
    options: dict[str, Any] = {"cluster": cluster, "hierarchical_min_bytes": 0} if cluster else {}
    try:
        comm = holmes_comm.init(store, rank, size, nics=nics, timeout_s=60, connect_timeout_s=40, **options)
    except errors.HolmesError as error:
        if check != "refused":
            raise
        print(f"REFUSED {type(error).__name__}: {error}")
        leave(store, rank, size)
        return
    assert check != "refused"
    check_transports(comm, store, os.environ.get("RIG_EXPECTED", transport))
    if check in ("many", "ends"):
        (check_many if check == "many" else check_ends)(
            comm,
            lambda name: holmes_comm.init(
                store, rank, size, nics=nics, name=name, timeout_s=60, connect_timeout_s=40, **options
            ),
        )
        return
    checks = {"everything": check_everything, "rates": check_rates, "pulled": check_pulled, "rails": check_rails}
    checks[check](comm)
    del comm
    leave(store, rank, size)
    print(f"DONE {rank}")


def leave(store: holmes_comm.TcpStore, rank: int, size: int) -> None:
    """Rank 0 serves the store until all others need it no more."""
    store.set(f"end/{rank}", b"1")
    for other in range(size if rank == 0 else 0):
        store.get(f"end/{other}")


main()
