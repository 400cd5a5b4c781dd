"""The exact optimum of an interleaved problem whose transformer layers are all equal, at any size.

Where layers are equal, a stage's time follows from how many it holds, whichever they are; how they are spread over its
chunks matters for memory alone. So: the most layers that fit each stage, then a chain over the stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from holmes.planning.partition.chain import best_chain
from holmes.planning.partition.memory import cuts_of, starts
from holmes.planning.partition.problem import Floats, Ints, PartitionProblem, partition_at, split_evenly

_LISTED_SPREADS = 200_000  # of one stage's layers over its chunks


def best_of_equal(problem: PartitionProblem) -> tuple[int, ...] | None:
    """The best cuts; None where layers differ, where no partition fits, or where there are too many spreads to try."""
    places = [i for i, layer in enumerate(problem.layers) if layer.kind == "transformer"]
    same = len({problem.layers[i] for i in places}) == 1 and places[-1] - places[0] == len(places) - 1
    if not same or not problem.least_layers:
        return None
    least = problem.chunks * problem.least_layers
    room = len(places) - (len(problem.stages) - 1) * least
    try:
        stages = [_EqualStage(problem, stage, places) for stage in range(len(problem.stages))]
        most = [stage.most_layers(least, room) for stage in stages]
        base = partition_at(problem, starts(problem)[0])
        layer = problem.layers[places[0]]
        held = np.subtract.outer(np.arange(len(places) + 1), np.arange(len(places) + 1)).T

        def cost(stage: int) -> Floats:
            added = (held - base.layers_per_stage[stage]) * (layer.forward_s + layer.backward_s)
            time = base.stage_s[stage] + added / problem.stages[stage].speed
            return np.where((held >= least) & (held <= most[stage]), time, np.inf)

        chain = best_chain(len(stages), len(places) + 1, cost)
        if chain is None:
            return None
        counts = [0] * problem.virtual_stages
        for i, stage in enumerate(stages):
            counts[i :: len(stages)] = stage.spread(chain[i + 1] - chain[i]) or []
    except _TooManySpreads:
        return None
    return cuts_of(problem, counts)


class _TooManySpreads(Exception):
    """Memory decides how a stage's layers are spread over its chunks, and there are too many ways to try all."""


class _EqualStage:
    """The memory of one stage as a function of the layers in each of its chunks."""

    def __init__(self, problem: PartitionProblem, stage: int, places: Sequence[int]):
        self.problem = problem
        self.limit = problem.stages[stage].memory_bytes
        self.moments = problem.moments(stage)
        self.layer = problem.layers[places[0]]
        self.fixed_held = np.zeros(problem.chunks)
        self.fixed_bytes = 0.0
        self.working = self.layer.working_bytes
        ends = {0: problem.layers[: places[0]], problem.virtual_stages - 1: problem.layers[places[-1] + 1 :]}
        for part, layers in ends.items():
            if part % len(problem.stages) == stage:
                self.fixed_held[part // len(problem.stages)] += sum(end.activation_bytes for end in layers)
                self.fixed_bytes += sum(end.state_bytes for end in layers)
                self.working = max([self.working, *(end.working_bytes for end in layers)])

    def most_layers(self, least: int, room: int) -> int:
        """The most layers, up to `room`, that fit; less than `least` where not even those do."""
        fits, over = least - 1, room + 1
        while over - fits > 1:
            middle = (fits + over) // 2
            fits, over = (middle, over) if self.spread(middle) else (fits, middle)
        return fits

    def spread(self, layers: int) -> list[int] | None:
        """Layers of each chunk, as even as memory allows; None where no spread fits."""
        even = list(split_evenly(layers, self.problem.chunks))
        if self.limit is None or self._fits(np.array([even]))[0]:
            return even
        least_held = layers * self.layer.activation_bytes * self.moments.min(axis=1).max()
        if layers * self.layer.state_bytes + least_held + self.fixed_bytes + self.working > self.limit:
            return None
        spare = layers - self.problem.chunks * (self.problem.least_layers - 1)
        if math.comb(spare - 1, self.problem.chunks - 1) > _LISTED_SPREADS:
            raise _TooManySpreads
        every = np.array(list(_compositions(spare, self.problem.chunks))) + self.problem.least_layers - 1
        every = every[self._fits(every)]
        if not len(every):
            return None
        return [int(count) for count in every[np.square(every).sum(axis=1).argmin()]]

    def _fits(self, counts: Ints) -> Ints:
        """Of many spreads, (n, chunks): whether each keeps the limit."""
        held = ((counts * self.layer.activation_bytes + self.fixed_held) @ self.moments.T).max(axis=1)
        used = held + counts.sum(axis=1) * self.layer.state_bytes + self.fixed_bytes + self.working
        return np.asarray(used <= (np.inf if self.limit is None else self.limit))


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, total), parts - 1):
        yield tuple(end - begin for begin, end in zip((0, *inner), (*inner, total), strict=True))
