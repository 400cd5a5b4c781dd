"""What to say where no partition keeps the stages' memory limits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from holmes.planning.partition.equal import best_of_equal, has_equal_layers
from holmes.planning.partition.memory import least_overshoot, limits, overshoot
from holmes.planning.partition.problem import LAYER_KINDS, PartitionProblem, Stage, costs
from holmes.planning.partition.window import Window

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
    if problem.chunks > 1 and has_equal_layers(other):
        return best_of_equal(other) is not None
    if problem.chunks > 1:
        return overshoot(other, least_overshoot(other)) <= 0
    return Window(other, [0] * count + [len(problem.layers)], 0).least_overshoot_bytes() <= 0


def _bytes(count: float) -> str:
    return f"{math.ceil(count):,} bytes"
