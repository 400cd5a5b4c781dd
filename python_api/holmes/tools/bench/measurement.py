"""What one peer did on one case: times, rates, processor time and ratios to other peers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from holmes.tools.bench.control import Samples
from holmes.tools.bench.operations import Case


@dataclass(frozen=True)
class Measurement:
    """One peer on one case. Times are of one call, the slowest rank's, in seconds; not a number where unknown."""

    peer: str
    case: Case
    round_times_s: tuple[float, ...]  # a call's time in each round, calls back to back
    singles_s: Samples  # calls timed one by one, of all rounds; none where none were
    calls: int  # back to back, of all rounds
    cpu_s: float  # processor time of all ranks together during these
    machine_s: float | None  # processor time of all processes of the machine; None where ranks are on several
    wall_s: float  # the slowest rank's, during these
    wrong_elements: int | None  # over all ranks, in the first call; None where nothing was checked
    ratios: Mapping[str, float] = field(default_factory=dict)  # how many times faster than each peer named here

    @property
    def time_s(self) -> float:
        """Time of a call, back to back: median over rounds."""
        return float(np.median(self.round_times_s))

    @property
    def p50_s(self) -> float | None:
        """Median of calls timed one by one; None where none were."""
        return float(np.percentile(self.singles_s, 50)) if len(self.singles_s) else None

    @property
    def p99_s(self) -> float | None:
        """99th percentile of calls timed one by one; None where none were."""
        return float(np.percentile(self.singles_s, 99)) if len(self.singles_s) else None

    @property
    def algorithm_gb_per_s(self) -> float:
        """Size over time, in 1e9 bytes per second."""
        return self.case.size_bytes / self.time_s / 1e9

    @property
    def bus_gb_per_s(self) -> float:
        """Algorithm bandwidth times nccl-tests' factor: comparable with a link's rate for any number of ranks."""
        return self.algorithm_gb_per_s * self.case.operation.bus_factor(self.case.ranks)

    @property
    def cores(self) -> float | None:
        """Processor cores busy, all ranks together; None where unknown."""
        return None if math.isnan(self.cpu_s) else self.cpu_s / self.wall_s

    @property
    def foreign_cores(self) -> float | None:
        """Cores that processes beside the ranks kept busy meanwhile: what spoils a result. None on several machines,
        and where the ranks' own are unknown."""
        if self.machine_s is None or math.isnan(self.cpu_s):
            return None
        return max(self.machine_s - self.cpu_s, 0.0) / self.wall_s

    @property
    def gb_per_core_s(self) -> float | None:
        """Sizes of all ranks and calls in 1e9 bytes, over the processor time they cost; None where it was too little
        for the clock, or unknown."""
        total_bytes = self.case.size_bytes * self.case.ranks * self.calls
        return total_bytes / self.cpu_s / 1e9 if self.cpu_s > 0 else None
