"""Times a round of calls on one rank: back to back for the time of a call, one by one for its percentiles."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from holmes.tools.bench.control import Samples

# A round is cut into this many parts, whose median stands for it: one disturbance spoils one part.
PARTS = 5
# Up to so many calls of a round are timed one by one. Calls so short that more fit into a round are also timed without
# a clock between them, which would be a visible share of a microsecond.
SINGLE_CALLS = 200


@dataclass(frozen=True)
class RoundTimes:
    """One rank's times of one round, in seconds; not a number where unknown."""

    parts_s: Samples  # mean of a call in each part of the round, back to back
    singles_s: Samples  # calls timed one by one; none where none were
    cpu_s: float = math.nan  # processor time of this process, user and system, all threads, while the parts ran
    machine_s: float = math.nan  # of all processes of the machine, and what its host withheld, while the parts ran
    wall_s: float = math.nan  # while the parts ran


def time_calls(call: Callable[[], None], count: int) -> Samples:
    """Returns the duration of each of `count` calls in seconds, with one reading of the clock between two calls."""
    stamps = [time.perf_counter()]
    for _ in range(count):
        call()
        stamps.append(time.perf_counter())
    return np.diff(stamps)


def machine_cpu_s() -> float:
    """Returns the seconds that processes of this machine have run since it booted, with those its host withheld."""
    with open("/proc/stat") as lines:
        user, nice, system, _, _, _, _, steal = map(int, lines.readline().split()[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def time_round(call: Callable[[], None], count: int) -> RoundTimes:
    """Times `count` calls, and where they are too short for a clock between them, some more."""
    shares = [len(share) for share in np.array_split(np.empty(count), min(PARTS, count))]
    machine_start_s = machine_cpu_s()
    cpu_start, start = time.process_time(), time.perf_counter()
    if count <= SINGLE_CALLS:
        singles = time_calls(call, count)
        parts = np.array([share.mean() for share in np.array_split(singles, len(shares))])
    else:
        stamps = [start]
        for share in shares:
            for _ in range(share):
                call()
            stamps.append(time.perf_counter())
        parts = np.diff(stamps) / shares
    cpu_s, wall_s = time.process_time() - cpu_start, time.perf_counter() - start
    machine_s = machine_cpu_s() - machine_start_s
    if count > SINGLE_CALLS:
        singles = time_calls(call, SINGLE_CALLS)
    return RoundTimes(parts, singles, cpu_s, machine_s, wall_s)
