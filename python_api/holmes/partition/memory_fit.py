"""How far partitions keep the stages' memory limits, and those that exceed them least."""

from __future__ import annotations

import numpy as np

from holmes.partition.problem import Floats, PartitionProblem, costs
from holmes.partition.rules import split_by_speed, split_evenly
from holmes.partition.window import Window

SWEEPS = 50  # rounds of improvement of an interleaved partition, each over all windows; in practice 2 to 5 happen


def limits(problem: PartitionProblem) -> Floats:
    """Memory limit of every stage in bytes; infinite where there is none."""
    return np.array([np.inf if stage.memory_bytes is None else stage.memory_bytes for stage in problem.stages])


def overshoot(problem: PartitionProblem, cuts: tuple[int, ...]) -> float:
    """Bytes by which the worst stage exceeds its limit; below 0 where all fit."""
    return float((costs(problem, np.array([cuts]))[2][0] - limits(problem)).max())


def least_overshoot(problem: PartitionProblem) -> tuple[int, ...]:
    """Cuts that exceed the limits by as little as possible (with chunks > 1: as was found)."""
    if problem.chunks == 1:
        return Window(problem, [0] * len(problem.stages) + [len(problem.layers)], 0).least_overshoot()
    return min((fitted(problem, start) for start in starts(problem)), key=lambda cuts: overshoot(problem, cuts))


def fitted(problem: PartitionProblem, cuts: tuple[int, ...]) -> tuple[int, ...]:
    """Interleaved cuts near `cuts` that keep the limits, or exceed them by as little as was found."""
    excess = overshoot(problem, cuts)
    for _ in range(SWEEPS):
        before = excess
        for first in window_places(problem):
            if excess <= 0:
                return cuts
            candidate = Window(problem, cuts, first).least_overshoot()
            if (now := overshoot(problem, candidate)) < excess:
                cuts, excess = candidate, now
        if excess == before:
            break
    return cuts


def starts(problem: PartitionProblem) -> list[tuple[int, ...]]:
    """Where the search for an interleaved partition begins: even, and by speed."""
    # Every part must hold least_layers transformer layers; where none is required, any layer will do.
    wanted = [i for i, layer in enumerate(problem.layers) if not problem.least_layers or layer.kind == "transformer"]
    least, parts = max(problem.least_layers, 1), problem.virtual_stages
    speeds = [stage.speed for stage in problem.stages] * problem.chunks
    spare = len(wanted) - parts * (least - 1)
    found = []
    for counts in (split_evenly(spare, parts), split_by_speed(spare, speeds, alpha=1.0)):
        ends = np.cumsum([count + least - 1 for count in counts])[:-1]
        found.append((0, *(wanted[end] for end in ends), len(problem.layers)))
    return list(dict.fromkeys(found))


def window_places(problem: PartitionProblem) -> list[int]:
    """First parts of the windows of one sweep; they overlap, so that every cut may move."""
    stages = len(problem.stages)
    last = problem.virtual_stages - stages
    return [*range(0, last, max(1, stages // 4)), last]
