"""The exact optimum of an interleaved problem whose transformer layers are all equal, at any size.

Where layers are equal, a stage's time follows from how many it holds, whichever they are; how they are spread over its
matters for memory alone. So: the most layers that fit each stage, how many each gets, and their spread (spread.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from holmes.planning.partition.memory import cuts_of, starts
from holmes.planning.partition.problem import Floats, PartitionProblem, partition_at, split_evenly
from holmes.planning.partition.spread import latest, most_even


def has_equal_layers(problem: PartitionProblem) -> bool:
    """Whether `best_of_equal` solves it: the transformer layers are equal, stand together, and every part has some."""
    places = _places(problem)
    equal = len({problem.layers[i] for i in places}) == 1
    return equal and places[-1] - places[0] == len(places) - 1 and problem.least_layers > 0


def best_of_equal(problem: PartitionProblem) -> tuple[int, ...] | None:
    """The best cuts; None where no partition fits."""
    places = _places(problem)
    least = problem.chunks * problem.least_layers
    room = len(places) - (len(problem.stages) - 1) * least
    stages = [_EqualStage(problem, stage, places) for stage in range(len(problem.stages))]
    most = [stage.most_layers(least, room) for stage in stages]
    base = partition_at(problem, starts(problem)[0])
    layer = problem.layers[places[0]]

    def times(stage: int) -> Floats:
        added = np.arange(least, most[stage] + 1) - base.layers_per_stage[stage]
        layers_s = added * (layer.forward_s + layer.backward_s)
        return np.asarray(base.stage_s[stage] + layers_s / problem.stages[stage].speed)

    held = _best_counts(len(places), least, [times(stage) for stage in range(len(stages))])
    if held is None:
        return None
    counts = [0] * problem.virtual_stages
    for i, stage in enumerate(stages):
        counts[i :: len(stages)] = stage.spread(held[i])
    return cuts_of(problem, counts)


def _best_counts(total: int, least: int, times: Sequence[Floats]) -> list[int] | None:
    """How many of `total` layers each stage holds for the least maximum time, then the least sum of squared times.

    `times[stage]`: of `least` layers, of one more, and so on up to the most that fit, each no shorter than the one
    before. None where they do not fit.
    """
    if min(map(len, times)) < 1 or sum(least + len(own) - 1 for own in times) < total:
        return None
    allowed_s = np.unique(np.concatenate(times))
    allowed_s = allowed_s[allowed_s >= max(own[0] for own in times)]
    at = bisect_left(allowed_s, total, key=lambda time_s: sum(_most_within(time_s, least, times)))
    most = _most_within(allowed_s[at], least, times)
    # Layers in the stages so far: (first, last), all that leave each later stage between the least and the most.
    before, squares, origins, firsts = (0, 0), np.zeros(1), [], [0]
    for stage, own in enumerate(times):
        later = len(times) - 1 - stage
        first = max(before[0] + least, total - sum(most[stage + 1 :]))
        after = (first, min(before[1] + most[stage], total - later * least))
        held = np.arange(after[0], after[1] + 1) - np.arange(before[0], before[1] + 1)[:, None]
        square = np.square(np.maximum(own[np.clip(held - least, 0, len(own) - 1)], 0.0))
        step = np.where((held >= least) & (held <= most[stage]), square, np.inf) + squares[:, None]
        origins.append(step.argmin(axis=0))
        before, squares = after, step.min(axis=0)
        firsts.append(first)
    place, counts = total, []
    for stage in reversed(range(len(times))):
        start = firsts[stage] + int(origins[stage][place - firsts[stage + 1]])
        counts.append(place - start)
        place = start
    return counts[::-1]


def _most_within(time_s: float, least: int, times: Sequence[Floats]) -> list[int]:
    return [least + int(np.searchsorted(own, time_s, side="right")) - 1 for own in times]


def _places(problem: PartitionProblem) -> list[int]:
    return [i for i, layer in enumerate(problem.layers) if layer.kind == "transformer"]


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
            enough = self._fits(latest(middle, self.problem.chunks, self.problem.least_layers))
            fits, over = (middle, over) if enough else (fits, middle)
        return fits

    def spread(self, layers: int) -> list[int]:
        """Layers of each chunk, no more than `most_layers`, as even as memory allows."""
        even = list(split_evenly(layers, self.problem.chunks))
        if self.limit is None or self._fits(even):
            return even
        free = self.limit - layers * self.layer.state_bytes - self.fixed_bytes - self.working
        room = (free - self.moments @ self.fixed_held) / self.layer.activation_bytes
        return most_even(layers, self.problem.least_layers, self.moments, room, self._fits)

    def _fits(self, counts: Sequence[int]) -> bool:
        held = (self.moments @ (np.array(counts) * self.layer.activation_bytes + self.fixed_held)).max()
        used = held + sum(counts) * self.layer.state_bytes + self.fixed_bytes + self.working
        return self.limit is None or bool(used <= self.limit)
