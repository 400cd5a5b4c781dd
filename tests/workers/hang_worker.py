"""A rank of planted hangs: ``hang_worker.py PORT RANK SIZE``. Plays the scenario that each line of stdin names.

Every scenario has communicators of its own; the test ends it by writing a line, after it has asked who waits for whom.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading

import numpy as np

import holmes_comm

TIMEOUT_S = 60.0  # far beyond the test's: hangs are ended by the test
VICTIM = 1


class Scenario:
    def __init__(self, store, rank: int, size: int, name: str, end: threading.Event) -> None:
        self.store, self.rank, self.size, self.name, self.end = store, rank, size, name, end
        self.comms: list = []

    def comm(self, group: str = "dp", transport: str = "tcp", **options):
        made = holmes_comm.init(
            self.store,
            self.rank,
            self.size,
            transport=transport,
            name=f"{group}-{self.name}",
            timeout_s=TIMEOUT_S,
            connect_timeout_s=20.0,
            options=holmes_comm.CommunicatorOptions(**options),
        )
        self.comms.append(made)
        return made

    def load_batch(self) -> None:
        """Slow Python code: the rank calls nothing."""
        self.end.wait(TIMEOUT_S)


def slow_rank(s: Scenario) -> None:
    dp = s.comm()
    dp.all_reduce(np.ones(10))
    if s.rank == VICTIM:
        s.load_batch()
        return
    dp.all_reduce(np.ones(1000, "float32"))


def stopped_process(s: Scenario) -> None:
    dp = s.comm()
    dp.barrier()
    if s.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    dp.reduce_scatter(np.ones(4), np.ones(4 * s.size))


def recv_without_send(s: Scenario) -> None:
    dp = s.comm()
    pp = s.comm("pp")
    if s.rank == VICTIM:
        pp.recv(np.ones(10), 2, 5)  # rank 2 never sends
        return
    if s.rank == 2:
        s.load_batch()
        return
    dp.all_reduce(np.ones(10))


def send_without_recv(s: Scenario) -> None:
    pp = s.comm("pp")
    if s.rank == 0:
        pp.send(np.ones(16 * 2**20, "uint8"), VICTIM)
    else:
        s.load_batch()


def mutual_receives(s: Scenario) -> None:
    pp = s.comm("pp")
    if s.rank < 2:
        pp.recv(np.ones(10), 1 - s.rank)
        pp.send(np.ones(10), 1 - s.rank)
    else:
        s.load_batch()


def group_order(s: Scenario) -> None:
    """Two groups with the same ranks, called in different order."""
    first, second = s.comm("a"), s.comm("b")
    groups = [second, first] if s.rank == VICTIM else [first, second]
    for group in groups:
        group.all_reduce(np.ones(10))


def wrong_order(s: Scenario) -> None:
    dp = s.comm()
    calls = [lambda: dp.all_reduce(np.ones(100, "float32")), lambda: dp.broadcast(np.ones(100, "float32"), 0)]
    for call in reversed(calls) if s.rank == VICTIM else calls:
        call()


def wrong_count(s: Scenario) -> None:
    s.comm().all_reduce(np.ones(1001 if s.rank == VICTIM else 1000, "float32"))


def wrong_dtype(s: Scenario) -> None:
    s.comm().all_reduce(np.ones(1000, "int32" if s.rank == VICTIM else "float32"))


def wrong_root(s: Scenario) -> None:
    s.comm().broadcast(np.ones(1000), 2 if s.rank == VICTIM else 0)


def wrong_root_locally(s: Scenario) -> None:
    """Nobody hears of it: all but one end on their own, and that one waits for a root that has sent nothing."""
    s.comm(local_completion=True).broadcast(np.ones(1000), 2 if s.rank == VICTIM else 0)


def crashed_rank(s: Scenario) -> None:
    """It ends before its call; nobody else calls anything that needs it but the collective."""
    dp = s.comm()
    dp.barrier()
    if s.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    dp.all_reduce(np.ones(1000))


def play(s: Scenario) -> None:
    try:
        globals()[s.name](s)
    except holmes_comm.HolmesError as error:
        print("error", type(error).__name__, flush=True)


def read_lines(lines: queue.Queue, current: list[Scenario]) -> None:
    """On a thread of its own, so that the main thread hangs as a program's would."""
    for line in sys.stdin:
        if line.strip() != "end":
            lines.put(line.strip())
            continue
        for comm in current[0].comms:
            comm.abort("the test ends the scenario")
        current[0].end.set()  # afterwards: who goes on closes its communicators in good order


def main() -> None:
    port, rank, size = map(int, sys.argv[1:4])
    store = holmes_comm.TcpStore("127.0.0.1", port, is_server=False, timeout_s=20.0)
    lines: queue.Queue = queue.Queue()
    current: list[Scenario] = [Scenario(store, rank, size, "", threading.Event())]
    threading.Thread(target=read_lines, args=(lines, current), daemon=True).start()
    while True:
        current[0] = Scenario(store, rank, size, lines.get(), threading.Event())
        print("begins", current[0].name, flush=True)
        play(current[0])
        current[0].end.wait(TIMEOUT_S)
        print("done", flush=True)


main()
