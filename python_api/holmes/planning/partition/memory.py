"""How far partitions keep the stages' memory limits, and those that exceed them least."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from holmes.planning.partition.problem import (
    Floats,
    PartitionProblem,
    costs,
    split_by_speed,
    split_evenly,
)
from holmes.planning.partition.window import Window

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
    least, parts = max(problem.least_layers, 1), problem.virtual_stages
    speeds = [stage.speed for stage in problem.stages] * problem.chunks
    spare = len(_countable(problem)) - parts * (least - 1)
    splits = (split_evenly(spare, parts), split_by_speed(spare, speeds, alpha=1.0))
    return list(dict.fromkeys(cuts_of(problem, [count + least - 1 for count in counts]) for counts in splits))


def shaken(problem: PartitionProblem, cuts: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """Cuts after a few layers moved from random parts to random others, the parts between them shifting along."""
    places = _countable(problem)
    counts = [sum(begin <= place < end for place in places) for begin, end in pairwise(cuts)]
    for _ in range(rng.randint(1, max(1, len(counts) // 2))):
        giver, taker = rng.randrange(len(counts)), rng.randrange(len(counts))
        if counts[giver] > max(problem.least_layers, 1):
            counts[giver] -= 1
            counts[taker] += 1
    return cuts_of(problem, counts)


def _countable(problem: PartitionProblem) -> list[int]:
    """The layers of which every part must hold some: transformer layers, or any where parts need none of those."""
    return [i for i, layer in enumerate(problem.layers) if not problem.least_layers or layer.kind == "transformer"]


def cuts_of(problem: PartitionProblem, counts: Sequence[int]) -> tuple[int, ...]:
    """The cuts where each part holds so many of the layers that `_countable` names."""
    places = _countable(problem)
    return (0, *(places[end] for end in list(accumulate(counts))[:-1]), len(problem.layers))


def window_places(problem: PartitionProblem) -> list[int]:
    """First parts of the windows of one sweep; they overlap, so that every cut may move."""
    stages = len(problem.stages)
    last = problem.virtual_stages - stages
    return [*range(0, last, max(1, stages // 4)), last]
