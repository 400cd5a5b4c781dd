"""The best of all partitions where they can be listed, and a search where they cannot.

A large interleaved problem whose layers differ has no proof of its optimum, but many local ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import chain, combinations, islice

import numpy as np

from holmes.planning.partition.memory import SWEEPS, fitted, limits, shaken, starts, window_places
from holmes.planning.partition.problem import Ints, PartitionProblem, costs
from holmes.planning.partition.window import Window

_RESTARTS = 20  # each from the best partition so far, shaken
_RESTART_TABLES = 1_200  # and no more than fit into this many (n, n) tables per sweep: some seconds at most
_LISTED_RUN = 2_000  # partitions that are tried for a run of parts
_LONGEST_RUN = 6
_RUNS = 32
_ROUNDING = 1e-12  # relative: less is no improvement


def searched(problem: PartitionProblem, enough_s: float) -> tuple[int, ...]:
    """The best cuts found; those nearest to the memory limits where none keeps them. Stops at `enough_s` or less.

    Local optima, from an even split, one by speed, and the best one shaken at random (the same on all ranks), of two
    steps: the exact best cuts of one run of the model through all stages, and all cuts of a shorter run of parts.
    """
    rng = random.Random(0)
    tables_per_sweep = len(window_places(problem)) * len(problem.stages)
    best = min(_improved(problem, start) for start in starts(problem))
    for _ in range(min(_RESTARTS, _RESTART_TABLES // tables_per_sweep)):
        if best[0][0] == 0 and best[0][1] <= enough_s:
            break
        best = min(best, _improved(problem, shaken(problem, best[1], rng)))
    return best[1]


def _improved(problem: PartitionProblem, cuts: tuple[int, ...]) -> tuple[Order, tuple[int, ...]]:
    """A local optimum near `cuts`, first in memory, then in time."""
    cuts = fitted(problem, cuts)
    best = (order(problem, cuts), cuts)
    for _ in range(SWEEPS):
        before = best[0]
        for first in window_places(problem):
            candidate = Window(problem, best[1], first).best_time()
            if candidate is not None:
                best = _better(best, (order(problem, candidate), candidate))
        parts = problem.virtual_stages
        for first in range(0, parts - 1, max(1, parts // _RUNS)):
            last = _end_of_run(best[1], first)
            if last > first:
                best = _better(best, best_listed(problem, best[1], first, last))
        if best[0] == before:
            break
    return best


def _end_of_run(cuts: tuple[int, ...], first: int) -> int:
    """The last part of the longest run from `first` on that has at most _LISTED_RUN partitions."""
    last = first
    for end in range(first + 1, min(first + _LONGEST_RUN, len(cuts) - 1)):
        if math.comb(cuts[end + 1] - cuts[first] - 1, end - first) > _LISTED_RUN:
            break
        last = end
    return last


def _better(old: tuple[Order, tuple[int, ...]], new: tuple[Order, tuple[int, ...]]) -> tuple[Order, tuple[int, ...]]:
    for before, after in zip(old[0], new[0], strict=True):
        if abs(after - before) > _ROUNDING * before:
            return new if after < before else old
    return old


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
