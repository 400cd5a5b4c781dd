"""How far partitions keep the stages' memory limits, those that exceed them least, and what to say where none fits."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from holmes.planning.partition.problem import (
    LAYER_KINDS,
    Floats,
    PartitionProblem,
    Stage,
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


_NAMED_STAGES = 8  # of those over their limit; a message is read by people


def memory_error(problem: PartitionProblem) -> ValueError:
    """The error for a problem that no partition (with chunks > 1: none that was found) fits."""
    cuts = least_overshoot(problem)
    memory, limit = costs(problem, np.array([cuts]))[2][0], limits(problem)
    excess = memory - limit
    worst = int(excess.argmax())
    over = [int(stage) for stage in np.flatnonzero(excess > 0)]
    numbers = [
        f"stage {i} {_bytes(memory[i])} of {_bytes(limit[i])}, over by {_bytes(excess[i])}"
        for i in over[:_NAMED_STAGES]
    ]
    if len(over) > _NAMED_STAGES:
        numbers.append(f"and {len(over) - _NAMED_STAGES} more stages by at most {_bytes(excess[worst])}")
    parts = [int(count) for count in np.diff(problem.prefix["count"][np.array(cuts)])]
    which = "partition" if problem.chunks == 1 else f"partition found with chunks={problem.chunks}"
    return ValueError(
        f"memory cannot fit: in the {which} that comes nearest, layers {parts} over {len(problem.stages)} stages with "
        f"schedule {problem.schedule!r} and {problem.micro_batches} micro-batches, {len(over)} stages are over their "
        f"limit, stage {worst} most ({'; '.join(numbers)}); {_fix(problem, float(excess[worst]))}"
    )


def _fix(problem: PartitionProblem, over: float) -> str:
    more = f"{_bytes(over)} more memory on every stage suffice"
    highest = float(limits(problem).max())
    index, alone = _largest_unit(problem)
    if alone > highest:
        others = "" if problem.layers[index].kind == LAYER_KINDS[0] else ", with the layers that must share its stage,"
        return (
            f"no number of stages fits, as layer {index} ({problem.layers[index].kind}){others} needs {_bytes(alone)} "
            f"and the largest limit is {_bytes(highest)}: use more tensor parallelism, optimizer shards or "
            f"recomputation; or {more}"
        )
    count = _least_stages(problem) if problem.chunks == 1 else _enough_stages(problem)
    if count is None:
        none = "fits" if problem.chunks == 1 else "was found to fit"
        return (
            f"no number of stages up to {_most_stages(problem)} {none}: use more tensor parallelism, optimizer "
            f"shards or recomputation; or {more}"
        )
    kinds = "" if len(set(problem.stages)) == 1 else " of these machines in the same proportion"
    fits = f"the smallest number of stages that fits is {count}" if problem.chunks == 1 else f"{count} stages fit"
    return f"{fits}{kinds}; or {more}"


def _largest_unit(problem: PartitionProblem) -> tuple[int, float]:
    """The layer that needs most in the smallest part that may hold it, one micro-batch in flight; and these bytes."""
    single = replace(problem, stages=(Stage(),), links=(), chunks=1, schedule="1f1b")
    need = Window(single, [0, len(single.layers)], 0).memory_bytes(0)
    # [i, i + 1] of the accumulated table: the least over parts that begin at or before i and end after it
    need = np.minimum.accumulate(need, axis=0)
    need = np.minimum.accumulate(need[:, ::-1], axis=1)[:, ::-1]
    holding = np.diagonal(need, offset=1)
    return int(holding.argmax()), float(holding.max())


def _least_stages(problem: PartitionProblem) -> int | None:
    for count in range(1, _most_stages(problem) + 1):
        if _fits(problem, count):
            return count
    return None


def _enough_stages(problem: PartitionProblem) -> int | None:
    """A number that fits, few if not the fewest: interleaved partitions are searched, too slow for all numbers."""
    most, below = _most_stages(problem), len(problem.stages)
    count = below
    while count < most:
        count = min(most, math.ceil(count * 1.25))
        if _fits(problem, count):
            while count - below > 1:
                middle = (count + below) // 2
                count, below = (middle, below) if _fits(problem, middle) else (count, middle)
            return count
        below = count
    return None


def _most_stages(problem: PartitionProblem) -> int:
    transformers = int(problem.prefix["count"][-1])
    return min(transformers // max(problem.least_layers, 1), len(problem.layers)) // problem.chunks


def _fits(problem: PartitionProblem, count: int) -> bool:
    """Whether `count` stages fit, each like the stage at the same relative place of the problem's."""
    stages = tuple(problem.stages[i * len(problem.stages) // count] for i in range(count))
    other = replace(problem, stages=stages, links=())
    if problem.prefix["state"][-1] > limits(other).sum():
        return False
    if problem.chunks > 1:
        return overshoot(other, least_overshoot(other)) <= 0
    return Window(other, [0] * count + [len(problem.layers)], 0).least_overshoot_bytes() <= 0


def _bytes(count: float) -> str:
    return f"{math.ceil(count):,} bytes"
