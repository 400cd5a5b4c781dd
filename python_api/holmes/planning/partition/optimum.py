"""The partition with the least bottleneck: exact without interleaving, and with it wherever that is practical."""

from __future__ import annotations

import math

from holmes.planning.partition.equal import best_of_equal, has_equal_layers
from holmes.planning.partition.memory import starts
from holmes.planning.partition.problem import Partition, PartitionProblem, partition_at
from holmes.planning.partition.search import best_listed, order, searched
from holmes.planning.partition.unfit import memory_error
from holmes.planning.partition.window import Window

LISTED_PARTITIONS = 100_000  # interleaved problems with at most so many partitions are solved by trying all: under 1 s
_ROUNDING = 1e-12


def best_partition(problem: PartitionProblem) -> Partition:
    """The partition with the least bottleneck time within all memory limits; of several, the one with even stages.

    Exact (`is_optimal`) with chunks=1, in O(stages * layers^2). With chunks > 1, exact where all transformer layers are
    equal, where at most LISTED_PARTITIONS partitions exist, or where the result meets the lower bound; else the best
    that a local search finds.

    Local and deterministic. Raises ValueError, with all numbers and the nearest fix, where memory cannot fit.
    """
    found = _best(problem)
    if found is None:
        raise memory_error(problem)
    cuts, is_optimal = found
    return partition_at(problem, cuts, is_optimal=is_optimal)


def _best(problem: PartitionProblem) -> tuple[tuple[int, ...], bool] | None:
    """Cuts, and whether they are proven best; None where none keeps the memory limits."""
    last = len(problem.layers)
    if problem.chunks == 1:
        whole = Window(problem, [0] * len(problem.stages) + [last], 0).best_time()
        return None if whole is None else (whole, True)
    if has_equal_layers(problem):
        equal = best_of_equal(problem)
        return None if equal is None else (equal, True)
    if math.comb(last - 1, problem.virtual_stages - 1) <= LISTED_PARTITIONS:
        (excess, _, _), cuts = best_listed(problem, starts(problem)[0], 0, problem.virtual_stages - 1)
        return None if excess > 0 else (cuts, True)
    bound_s = _lower_bound_s(problem) * (1 + _ROUNDING)
    cuts = searched(problem, bound_s)
    excess, bottleneck_s, _ = order(problem, cuts)
    return None if excess > 0 else (cuts, bottleneck_s <= bound_s)


def _lower_bound_s(problem: PartitionProblem) -> float:
    """No partition is faster: all stages equally busy without transfers, or the longest layer on the fastest stage."""
    speeds = [stage.speed for stage in problem.stages]
    longest = max(layer.forward_s + layer.backward_s for layer in problem.layers)
    return max(float(problem.prefix["time"][-1]) / sum(speeds), longest / max(speeds))
