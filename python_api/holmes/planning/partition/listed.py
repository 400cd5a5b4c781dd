"""The best partition among all that are listed: every one of a small problem, or every one near a given one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations, islice

import numpy as np

from holmes.planning.partition.memory_fit import limits
from holmes.planning.partition.problem import Ints, PartitionProblem, costs

_BATCH = 20_000

Order = tuple[float, float, float]  # sorts partitions, best first: bytes over a limit, bottleneck, sum of squares


def order(problem: PartitionProblem, cuts: Sequence[int]) -> Order:
    """The place of a partition among others."""
    return _best(problem, np.array([cuts]))[0]


def best_listed(problem: PartitionProblem, cuts: Sequence[int], first: int, last: int) -> tuple[Order, tuple[int, ...]]:
    """The best partition that differs from `cuts` only in the cuts between parts `first` and `last`, and its order."""
    found = []
    for batch in _batches(range(cuts[first] + 1, cuts[last + 1]), last - first):
        every = np.tile(np.array(cuts), (len(batch), 1))
        every[:, first + 1 : last + 1] = batch
        counts = np.diff(problem.prefix["count"][every], axis=1)
        valid = every[(counts >= problem.least_layers).all(axis=1)]
        if len(valid):
            found.append(_best(problem, valid))
    return min(found)


def _best(problem: PartitionProblem, cuts: Ints) -> tuple[Order, tuple[int, ...]]:
    stage_s, link_s, memory = costs(problem, cuts)
    excess = np.maximum(memory - limits(problem), 0.0).max(axis=1)
    bottleneck = np.maximum(stage_s.max(axis=1), link_s.max(axis=1))
    squares = np.square(stage_s).sum(axis=1)
    at = np.lexsort((squares, bottleneck, excess))[0]
    return (float(excess[at]), float(bottleneck[at]), float(squares[at])), tuple(int(cut) for cut in cuts[at])


def _batches(places: range, count: int) -> Iterator[Ints]:
    """All ascending choices of `count` places, in batches (n, count)."""
    every = combinations(places, count)
    while batch := list(islice(every, _BATCH)):
        flat = np.fromiter(chain.from_iterable(batch), dtype=np.int64, count=len(batch) * count)
        yield flat.reshape(-1, count)
