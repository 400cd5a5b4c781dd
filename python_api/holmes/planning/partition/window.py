"""The exact best cuts of one run of the model through all stages, by dynamic programming; all else fixed.

A window is as many consecutive parts of the model as there are stages, so every stage has one part in it. Without
interleaving the window is the whole model and the result the optimum; with it, windows are improved in turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holmes.planning.partition.chain import best_chain, least_maximum
from holmes.planning.partition.problem import Floats, PartitionProblem


class Window:
    """Parts `first` to `first + stages - 1` of a partition, their outer cuts fixed; other parts' costs are the base.

    Tables are (n, n) over the positions of the window: [j, k] is a part that holds layers j to k - 1. n counts one more
    than the window's layers.
    """

    def __init__(self, problem: PartitionProblem, cuts: Sequence[int], first: int):
        self.problem = problem
        self.cuts = np.array(cuts)
        self.first = first
        self.parts = range(first, first + len(problem.stages))
        self.positions = np.arange(cuts[first], cuts[first + len(problem.stages)] + 1)
        self._begin, self._end = self.positions[:, None], self.positions[None, :]
        held = self._difference("count")
        self._valid = (held >= problem.least_layers) & (self._end > self._begin)
        self._working = problem.working_bytes[np.ix_(self.positions, self.positions)]

    def best_time(self) -> tuple[int, ...] | None:
        """Cuts with the least bottleneck, then the most even stages; None where no memory limit can be kept."""

        def cost(part: int) -> Floats:
            time = np.maximum(*self._time(self.first + part))
            return np.where(self.overshoot(self.first + part) <= 0, time, np.inf)

        return self._cuts(best_chain(len(self.parts), len(self.positions), cost))

    def least_overshoot(self) -> tuple[int, ...]:
        """Cuts with the least excess of any stage over its memory limit; below 0 where all fit."""
        chain = best_chain(len(self.parts), len(self.positions), lambda i: self.overshoot(self.first + i))
        cuts = self._cuts(chain)
        assert cuts is not None  # the problem's own check leaves every part a valid range
        return cuts

    def least_overshoot_bytes(self) -> float:
        """The excess that `least_overshoot` leaves; -inf where no stage has a limit."""
        return least_maximum(len(self.parts), len(self.positions), lambda i: self.overshoot(self.first + i))

    def _cuts(self, chain: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if chain is None:
            return None
        cuts = self.cuts.copy()
        cuts[self.first : self.first + len(chain)] = self.positions[list(chain)]
        return tuple(int(cut) for cut in cuts)

    def _time(self, part: int) -> tuple[Floats, Floats]:
        """Seconds of the part's stage, and of the link after it, both with what the other parts put on them."""
        problem, stages = self.problem, len(self.problem.stages)
        stage = part % stages
        time = self._difference("time") / problem.stages[stage].speed
        before, after = problem.transfer_s(part - 1, self.positions), problem.transfer_s(part, self.positions)
        link = np.zeros((1, 1))
        if problem.overlap_transfers:
            link = np.broadcast_to(after[None, :], time.shape)
        else:
            time = time + 2 * before[:, None] + 2 * after[None, :]
        for other in self._others(stage):
            begin, end = self.cuts[other], self.cuts[other + 1]
            time = time + (problem.prefix["time"][end] - problem.prefix["time"][begin]) / problem.stages[stage].speed
            if problem.overlap_transfers:
                link = link + problem.transfer_s(other, end)
            else:
                time = time + 2 * problem.transfer_s(other - 1, begin) + 2 * problem.transfer_s(other, end)
        return time, link

    def overshoot(self, part: int) -> Floats:
        """Bytes by which the part's stage exceeds its limit (below 0: free); infinite for a part that may not be."""
        limit = self.problem.stages[part % len(self.problem.stages)].memory_bytes
        return np.where(self._valid, -np.inf, np.inf) if limit is None else self.memory_bytes(part) - limit

    def memory_bytes(self, part: int) -> Floats:
        """Peak bytes of the part's stage; infinite for a part that may not be."""
        problem, stages = self.problem, len(self.problem.stages)
        stage = part % stages
        moments = problem.moments(stage)
        base_state, base_working, base_held = 0.0, 0.0, np.zeros(len(moments))
        for other in self._others(stage):
            begin, end = self.cuts[other], self.cuts[other + 1]
            base_state += float(problem.prefix["state"][end] - problem.prefix["state"][begin])
            held = problem.prefix["activation"][end] - problem.prefix["activation"][begin]
            base_held = base_held + moments[:, other // stages] * held
            base_working = max(base_working, float(problem.working_bytes[begin, end]))
        own = moments[:, part // stages]
        activation = self._difference("activation")
        peak, most_held = np.full(activation.shape, -np.inf), -np.inf
        for count in np.unique(own)[::-1]:
            held = base_held[own == count].max()
            if held > most_held:  # else a moment with more micro-batches of this part holds as much of the others
                peak, most_held = np.maximum(peak, count * activation + held), held
        used = base_state + self._difference("state") + peak + np.maximum(base_working, self._working)
        return np.where(self._valid, used, np.inf)

    def _others(self, stage: int) -> list[int]:
        """The stage's parts outside the window."""
        every = range(stage, self.problem.virtual_stages, len(self.problem.stages))
        return [part for part in every if part not in self.parts]

    def _difference(self, column: str) -> Floats:
        prefix = self.problem.prefix[column][self.positions]
        return np.asarray(prefix[None, :] - prefix[:, None])
