"""What a message between two ranks costs in groups of different size, where every one is slept for.

python benchmarks/bench_wakeup.py                   # groups of 2, 16 and 64 ranks, threads of this process, over TCP
python benchmarks/bench_wakeup.py --ranks 4 --ranks 32 --rounds 9
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from typing import Any

import numpy as np

import holmes_comm

PING_PONGS = 300
SPIN_US = 0  # every message wakes its receiver


def group_of(size: int) -> list[Any]:
    """Communicators of `size` ranks, by rank."""
    store = holmes_comm.LocalStore()
    found: list[Any] = [None] * size

    def join(rank: int) -> None:
        options = holmes_comm.CommunicatorOptions()
        options.spin_us = SPIN_US
        found[rank] = holmes_comm.init(store, rank, size, name=f"of {size}", transport="tcp", options=options)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def ping_pong(one: Any, other: Any) -> tuple[float, float]:
    """Microseconds of a round trip of 8 bytes: on the clock, and of processor time in this process."""

    def answer() -> None:
        data = np.zeros(8, np.uint8)
        for _ in range(PING_PONGS):
            other.recv(data, 0)
            other.send(data, 0)

    thread = threading.Thread(target=answer)
    clock, processor = time.perf_counter(), time.process_time()
    thread.start()
    data = np.zeros(8, np.uint8)
    for _ in range(PING_PONGS):
        one.send(data, 1)
        one.recv(data, 1)
    thread.join()
    microseconds = 1e6 / PING_PONGS
    return (time.perf_counter() - clock) * microseconds, (time.process_time() - processor) * microseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append", help="of a group, at least 2; again for more groups")
    parser.add_argument("--rounds", type=int, default=7, help="medians of so many, the groups in turns")
    arguments = parser.parse_args()
    sizes = arguments.ranks or [2, 16, 64]
    groups = {size: group_of(size) for size in sizes}
    times: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    for _ in range(arguments.rounds):
        for size, group in groups.items():
            times[size].append(ping_pong(group[0], group[1]))
    print("| ranks | round trip us | processor us |\n| --- | --- | --- |")
    for size in sizes:
        clock_us, processor_us = (statistics.median(column) for column in zip(*times[size], strict=True))
        print(f"| {size} | {clock_us:.1f} | {processor_us:.1f} |")


if __name__ == "__main__":
    main()
