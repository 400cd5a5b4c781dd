"""One rank of a test of what a process does beside its operations: ``process_worker.py SCENARIO PORT RANK TRANSPORT``.

idle: several communicators, then silence; prints what it used meanwhile. pinned: prints the I/O threads' processors.
forked: a child that lives on, as a DataLoader's worker does, and tries the communicator; rank 1 is then killed.
batches: many messages at once, each awaited in order; prints how often the I/O threads went to sleep, by round.
cut_sent, cut_received: rank 1 gives memory over a file whose second half is gone to a message over two connections;
prints the errors.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from outcomes import error_fields

import holmes_comm

COMMUNICATORS = 8
IDLE_S = 2.0
ROUNDS = 40
BATCHES = 30
MESSAGES = 16
CHILD_S = 30.0
IO_THREAD = "holmes-io-"


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def threads() -> dict[str, Path]:
    """The threads of this process by number and name."""
    return {f"{task.name} {(task / 'comm').read_text().strip()}": task for task in Path("/proc/self/task").iterdir()}


def wake_ups() -> dict[str, int]:
    """How often each thread but the calling one went to sleep so far."""
    own = str(os.getpid())
    counts = {}
    for name, task in threads().items():
        if task.name != own:
            lines = (task / "status").read_text().splitlines()
            counts[name] = next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return counts


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def make(store, rank: int, transport: str, number: int = 0):
    return holmes_comm.init(
        store, rank, 2, transport=transport, name=f"number{number}", timeout_s=20.0, connect_timeout_s=20.0
    )


def use(comms) -> None:
    """Synchronous, asynchronous and point-to-point operations on each."""
    data = np.ones(300_000, "float32")
    for comm in comms:
        comm.all_reduce(data)
    for work in [comm.all_reduce(np.ones(300_000, "float32"), async_op=True) for comm in comms]:
        work.wait()
    for comm in comms:
        if comm.rank == 0:
            comm.send(data, 1)
        else:
            comm.recv(data, 0)


def idle(store, rank: int, transport: str) -> None:
    comms = [make(store, rank, transport, number) for number in range(COMMUNICATORS)]
    use(comms)
    comms[0].barrier()
    time.sleep(0.5)  # what the operations left to do
    before, switches = cpu_s(), wake_ups()
    time.sleep(IDLE_S)
    used, after = cpu_s() - before, wake_ups()
    say(rank=rank, cpu_s=used, wake_ups={name: after[name] - switches.get(name, 0) for name in after})
    comms[0].barrier()


def pinned(store, rank: int, transport: str) -> None:
    comms = [make(store, rank, transport, number) for number in range(COMMUNICATORS)]
    use(comms)
    found = {
        name.split()[1]: sorted(os.sched_getaffinity(int(task.name)))
        for name, task in threads().items()
        if IO_THREAD in name
    }
    say(rank=rank, io_threads=found, own=sorted(os.sched_getaffinity(0)))
    comms[0].barrier()


def batches(store, rank: int, transport: str) -> None:
    comm = make(store, rank, transport)
    sent, received = np.ones((MESSAGES, 20_000), "float32"), np.zeros((MESSAGES, 20_000), "float32")
    calls = [call for number in range(MESSAGES)
             for call in (("recv", received[number], 1 - rank, 0), ("send", sent[number], 1 - rank, 0))]  # fmt: skip
    sleeps = []
    for _ in range(ROUNDS):
        comm.barrier()
        before = wake_ups()
        for _ in range(BATCHES):
            for work in comm.batch(calls):
                work.wait()
        sleeps.append(sum(count - before.get(name, 0) for name, count in wake_ups().items() if IO_THREAD in name))
    assert (received == 1).all()
    say(rank=rank, sleeps=sleeps)


def forked(store, rank: int, transport: str) -> None:
    comm = make(store, rank, transport)
    use([comm])
    if rank == 1:
        pending = comm.recv(np.empty(1), 0, tag=9, async_op=True)
        if os.fork() == 0:
            refused = []
            for call in (comm.barrier, lambda: comm.all_reduce(np.ones(10), async_op=True), pending.wait):
                try:
                    call()
                except holmes_comm.UsageError as error:
                    refused.append(str(error))
            # A communicator of its own works, on an I/O thread of its own.
            own = holmes_comm.init(holmes_comm.LocalStore(), 0, 1, name="alone")
            own.all_reduce(np.ones(10), async_op=True).wait()
            say(child=os.getpid(), refused=refused, dead=comm.is_dead)
            del pending, comm  # which must not disturb the parent
            say(destroyed=True)
            time.sleep(CHILD_S)
            os._exit(0)
    use([comm])  # the child has not disturbed anything
    comm.barrier()
    if rank == 1:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        comm.barrier()
    except holmes_comm.PeerLostError as error:
        say(rank=rank, message=str(error), seconds=time.monotonic() - start)


def exchange_cut(store, rank: int, nics: holmes_comm.NicSelection, is_sent: bool) -> None:
    comm = holmes_comm.init(store, rank, 2, nics=nics, name="cut", timeout_s=20.0, connect_timeout_s=20.0)
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(4 << 20)
        data = np.memmap(file, np.uint8, "r+") if rank == 1 else np.ones(4 << 20, np.uint8)
        file.truncate(2 << 20)
        try:
            if (rank == 1) == is_sent:
                comm.send(data, 1 - rank)
            else:
                comm.recv(data, 1 - rank)
            comm.barrier()
        except holmes_comm.HolmesError as error:
            say(rank=rank, **error_fields(error))


def cut_sent(store, rank: int, transport: str) -> None:
    exchange_cut(store, rank, holmes_comm.NicSelection(transport=transport, streams=2), is_sent=True)


def cut_received(store, rank: int, transport: str) -> None:
    exchange_cut(store, rank, holmes_comm.NicSelection(transport=transport, streams=2), is_sent=False)


def main() -> None:
    scenario, port, rank, transport = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    store = holmes_comm.TcpStore("127.0.0.1", port, is_server=False, timeout_s=20.0)
    globals()[scenario](store, rank, transport)


main()
