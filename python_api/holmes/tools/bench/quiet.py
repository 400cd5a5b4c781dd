"""Measuring on a machine that others use too: how much they took, and another try where it was too much."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from holmes.tools.bench.timing import machine_cpu_s

Found = TypeVar("Found")


class Others:
    """Context that counts what processes beside this one and its children keep busy; children end inside it."""

    cores = 0.0

    def __enter__(self) -> Others:
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        wall_s, others_s = (after - before for after, before in zip(self._now(), self._start, strict=True))
        self.cores = max(others_s, 0.0) / wall_s

    @staticmethod
    def _now() -> tuple[float, float]:
        """Seconds since boot, and processor seconds of all others."""
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.monotonic(), machine_cpu_s() - sum(each.ru_utime + each.ru_stime for each in usage)


@dataclass(frozen=True)
class Quiet:
    """How to measure in peace; `worst` is the most that others kept busy in a measurement that was kept."""

    most_others: float  # cores
    attempts: int
    kept: list[float] = field(default_factory=list)

    @property
    def worst(self) -> float:
        """Cores."""
        return max(self.kept)

    def measure(self, what: str, call: Callable[[], tuple[Found, float]]) -> Found:
        """What the quietest call returned, beside the cores of others; no further call after one that is quiet."""
        tries: list[tuple[Found, float]] = []
        while len(tries) < self.attempts and (not tries or tries[-1][1] > self.most_others):
            tries.append(call())
            print(f"  {what}: others {tries[-1][1]:.2f} cores", flush=True)
        found, others = min(tries, key=lambda each: each[1])
        self.kept.append(others)
        return found
