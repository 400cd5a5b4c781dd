"""A new partition from a run's own timings, proposed only where it is clearly better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from holmes.planning.partition.optimum import best_partition
from holmes.planning.partition.problem import Partition, PartitionProblem, check_whole, partition_at
from holmes_comm.errors import UsageError


@dataclass(frozen=True)
class Proposal:
    """A partition that is better at the speeds observed. `gain`: the share of the bottleneck time that it saves."""

    partition: Partition
    current: Partition
    speeds: tuple[float, ...]

    @property
    def gain(self) -> float:
        """1 - new bottleneck / current bottleneck, both predicted at the observed speeds."""
        return 1 - self.partition.bottleneck_s / self.current.bottleneck_s

    def describe(self) -> str:
        """One line for people."""
        return (
            f"layers per stage {list(self.current.layers_per_stage)} -> {list(self.partition.layers_per_stage)}: "
            f"bottleneck {self.current.bottleneck_s:.4g} s -> {self.partition.bottleneck_s:.4g} s per micro-batch "
            f"({self.gain:.1%} less) at observed speeds {[float(f'{speed:.3g}') for speed in self.speeds]}"
        )


def observed_speeds(problem: PartitionProblem, current: Partition, stage_s: Sequence[float]) -> tuple[float, ...]:
    """Each stage's speed: the time its layers take at speed 1, over the time they took.

    `stage_s`: each stage's busy seconds per micro-batch, forward and backward of all its chunks, without waiting for
    others and without transfers. A stage whose layers are modelled at 0 s keeps its speed. Raises ValueError for other
    counts or times.
    """
    stages = len(problem.stages)
    if len(stage_s) != stages:
        raise UsageError(f"{len(stage_s)} observed times for {stages} stages; there must be one each")
    for stage, seconds in enumerate(stage_s):
        if not (math.isfinite(seconds) and seconds > 0):
            raise UsageError(f"observed time {seconds} s of stage {stage} must be positive and finite")
    prefix = problem.prefix["time"]
    work = [float(prefix[end] - prefix[begin]) for begin, end in zip(current.cuts, current.cuts[1:], strict=False)]
    return tuple(
        sum(work[stage::stages]) / seconds or problem.stages[stage].speed for stage, seconds in enumerate(stage_s)
    )


def replan(
    problem: PartitionProblem, current: Partition, stage_s: Sequence[float], *, least_gain: float = 0.05
) -> Proposal | None:
    """The best partition at the speeds that `stage_s` shows; None unless it saves more than `least_gain` of the time.

    `stage_s` as in `observed_speeds`. Both bottlenecks are predicted at the observed speeds, so a wrong first estimate
    of them costs nothing. Local; ranks that must agree give it the same times. Raises ValueError for a `least_gain`
    outside [0, 1), and as `best_partition` does.
    """
    _check_gain(least_gain)
    speeds = observed_speeds(problem, current, stage_s)
    stages = tuple(replace(stage, speed=speed) for stage, speed in zip(problem.stages, speeds, strict=True))
    at_speeds = replace(problem, stages=stages)
    proposal = Proposal(best_partition(at_speeds), partition_at(at_speeds, current.cuts), speeds)
    return proposal if proposal.gain > least_gain else None


def _check_gain(least_gain: float) -> None:
    if not 0 <= least_gain < 1:
        raise UsageError(f"least_gain={least_gain} must be at least 0 and below 1 (0.05: five per cent)")


class Replanner:
    """Watches a run and proposes a new partition where the last steps agree that it is clearly better.

    Hysteresis: once every `window_steps` steps, the medians of these steps count, so single slow steps change nothing,
    and nothing is proposed that saves no more than `least_gain`. All other steps cost next to nothing. After `adopt` a
    new window begins. One thread at a time.
    """

    def __init__(
        self, problem: PartitionProblem, current: Partition, *, least_gain: float = 0.05, window_steps: int = 20
    ):
        _check_gain(least_gain)  # now, not when the first window ends
        check_whole(window_steps=window_steps)
        if window_steps < 1:
            raise UsageError(f"window_steps={window_steps} must be at least 1")
        self.problem = problem
        self.current = current
        self.least_gain = least_gain
        self.window_steps = window_steps
        self._steps: list[tuple[float, ...]] = []

    def observe(self, stage_s: Sequence[float]) -> Proposal | None:
        """Adds one step's times (as in `observed_speeds`); a proposal where this step ends a window that has one."""
        observed_speeds(self.problem, self.current, stage_s)  # a wrong time is reported at once, not a window later
        self._steps.append(tuple(stage_s))
        if len(self._steps) < self.window_steps:
            return None
        times = [median(step[stage] for step in self._steps) for stage in range(len(self.problem.stages))]
        self._steps.clear()
        return replan(self.problem, self.current, times, least_gain=self.least_gain)

    def adopt(self, proposal: Proposal) -> None:
        """From now on the run uses this proposal's partition."""
        self.current = proposal.partition
        self._steps.clear()
