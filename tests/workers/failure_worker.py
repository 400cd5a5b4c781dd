"""One rank of a failure scenario, its outcome as JSON: ``failure_worker.py SCENARIO PORT RANK SIZE TRANSPORT``.

A sixth argument is the rank that something happens to, else rank 1.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time

import numpy as np
from outcomes import error_fields

import holmes_comm

TIMEOUT_S = 5.0
VICTIM = int(sys.argv[6]) if len(sys.argv) > 6 else 1


began_s = 0.0  # of the operation that fails: those before it take their own time, on a busy machine seconds


def forever(call) -> None:
    """Repeats ``call`` until it raises; bounded."""
    global began_s
    end = time.monotonic() + 60
    while (began_s := time.monotonic()) < end:
        call()


def killed(comm) -> None:
    """The victim dies inside an all_reduce of the others."""
    data = np.ones(4_000_000, "float32")
    comm.all_reduce(data)
    if comm.rank == VICTIM:
        work = comm.all_reduce(data, async_op=True)
        time.sleep(0.005)
        print(json.dumps({"state": work.state}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    forever(lambda: comm.all_reduce(data))


def stopped(comm) -> None:
    """The victim stops answering without closing anything."""
    comm.barrier()
    if comm.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGSTOP)
    forever(lambda: comm.all_reduce(np.ones(1000)))


def killed_in_p2p(comm) -> None:
    """The victim dies while rank 0 waits for its message."""
    comm.barrier()
    if comm.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 0:
        comm.recv(np.empty(10), VICTIM)
    forever(comm.barrier)


def stopped_in_chain(comm) -> None:
    """Rank 0 waits for rank 2, which waits for the victim; rank 0's deadline passes first."""
    comm.barrier()
    if comm.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGSTOP)
    if comm.rank == 2:
        time.sleep(0.3)
    comm.recv(np.empty(10), VICTIM if comm.rank == 2 else 2)


def killed_amid(comm, call) -> None:
    """The victim dies in the middle of ``call``, which the others repeat."""
    call()
    if comm.rank == VICTIM:
        call(async_op=True)
        time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)
    forever(call)


def killed_in_broadcast(comm) -> None:
    """The victim passes on what it receives."""
    killed_amid(comm, functools.partial(comm.broadcast, np.ones(8_000_000, "float32"), 0))


def killed_in_reduce(comm) -> None:
    """The victim sends its reduced block to the root."""
    killed_amid(comm, functools.partial(comm.reduce, np.ones(8_000_000, "float32"), 0))


def wrong_operation(comm) -> None:
    comm.barrier()
    data = np.ones(1000, "float32")
    if comm.rank == VICTIM:
        comm.broadcast(data, 0)
    else:
        comm.all_reduce(data)
    forever(comm.barrier)


def wrong_count(comm) -> None:
    comm.all_reduce(np.ones(1001 if comm.rank == VICTIM else 1000, "float32"))


def wrong_small_count(comm) -> None:
    """By so little that padded to 8 bytes it would be the same."""
    comm.all_reduce(np.ones(6 if comm.rank == VICTIM else 5, "float32"))


def wrong_small_gather(comm) -> None:
    count = 6 if comm.rank == VICTIM else 5
    comm.all_gather(np.empty(count * comm.size, "float32"), np.ones(count, "float32"))


def wrong_small_scatter(comm) -> None:
    count = 6 if comm.rank == VICTIM else 5
    comm.reduce_scatter(np.empty(count, "uint8"), np.ones(count * comm.size, "uint8"))


def wrong_dtype(comm) -> None:
    comm.all_reduce(np.ones(1000, "int32" if comm.rank == VICTIM else "float32"))


def wrong_root(comm) -> None:
    comm.broadcast(np.ones(1000), 1 if comm.rank == VICTIM else 0)


def wrong_message(comm) -> None:
    if comm.rank == VICTIM:
        comm.send(np.ones(10), 0)
    if comm.rank == 0:
        comm.recv(np.ones(11), VICTIM)
    forever(comm.barrier)


def aborted(comm) -> None:
    comm.barrier()
    if comm.rank == VICTIM:
        time.sleep(0.3)
        comm.abort("the test says so")
    forever(lambda: comm.all_reduce(np.ones(100_000)))


def left(comm) -> None:
    """The victim destroys its communicator in good order while the others go on."""
    comm.barrier()
    if comm.rank == VICTIM:
        return
    forever(lambda: comm.all_reduce(np.ones(1000)))


def left_after_a_death(comm) -> None:
    """Rank 0 leaves in good order after the victim has died; rank 2 comes when both are gone."""
    comm.barrier()
    if comm.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2 if comm.rank == 0 else 0.6)
    if comm.rank == 2:
        forever(lambda: comm.all_reduce(np.ones(1000)))


def main() -> None:
    scenario, port, rank, size, transport = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    store = holmes_comm.TcpStore("127.0.0.1", port, is_server=False, timeout_s=20.0)
    clusters = {}
    if transport == "clusters":  # everything hierarchical, the victim in the larger cluster
        transport, clusters = "tcp", {"cluster": "aab"[rank], "hierarchical_min_bytes": 0}
    comm = holmes_comm.init(
        store, rank, size, transport=transport, name=scenario, timeout_s=TIMEOUT_S, connect_timeout_s=20.0, **clusters
    )
    global began_s
    outcome: dict[str, object] = {"rank": rank}
    try:
        comm.barrier()  # all are set up: what follows fails in the scenario, not in somebody's set-up
        began_s = time.monotonic()
        globals()[scenario](comm)
    except holmes_comm.HolmesError as error:
        outcome |= {**error_fields(error), "seconds": time.monotonic() - began_s, "dead": comm.is_dead}
        # A new communicator of the survivors can be made in the same process.
        if scenario == "killed":
            survivors = [r for r in range(size) if r != VICTIM]
            again = holmes_comm.init(
                store, survivors.index(rank), len(survivors), transport=transport, name="again", connect_timeout_s=20.0
            )
            data = np.ones(10)
            again.all_reduce(data)
            outcome["rebuilt_sum"] = float(data[0])
            again.barrier()
    print(json.dumps(outcome), flush=True)


main()
