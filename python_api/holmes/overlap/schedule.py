"""Schedule: how many all-gathers start during backward, from what the first steps measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from holmes.overlap.transfers import ALL_GATHER, REDUCE_SCATTER, Transfer

OBSERVED_STEPS = 4  # the first of them, which backward did not overlap, is not used
_USED_SHARE = 0.9  # of the time that the link stood idle


class BackwardBudget:
    """Backward leaves the link idle where its reduce-scatters take less time than it does; all-gathers fit in there.

    Backward takes about twice as long as forward, and both carry the same bytes: without this the all-gathers are what
    stays exposed. Not thread-safe.
    """

    def __init__(self) -> None:
        self._idle_s: list[float] = []
        self._gather_s: dict[int, list[float]] = {}

    @property
    def is_full(self) -> bool:
        """Whether enough steps were observed."""
        return len(self._idle_s) >= OBSERVED_STEPS

    def observe(self, backward_s: float, ended: Sequence[tuple[Transfer, float]]) -> None:
        """One step without early all-gathers. Seconds from the first reduce-scatter's start to the end of backward, and
        the transfers that ended in the step, with the times they began to run."""
        taken = [(transfer, (transfer.ended_s or start_s) - start_s) for transfer, start_s in ended]
        self._idle_s.append(backward_s - sum(taken_s for transfer, taken_s in taken if transfer.kind == REDUCE_SCATTER))
        if len(self._idle_s) == 1:
            return
        for transfer, taken_s in taken:
            if transfer.kind == ALL_GATHER:
                self._gather_s.setdefault(transfer.bucket, []).append(taken_s)

    def early_gathers(self, buckets: int) -> int:
        """How many of the first buckets (in the order of backward) fit; at most all but the last."""
        if len(self._idle_s) < 2 or not self._gather_s:
            return 0
        left_s = statistics.median(self._idle_s[1:]) * _USED_SHARE
        longest_s = max(max(taken) for taken in self._gather_s.values())
        for bucket in range(buckets - 1):
            left_s -= statistics.median(self._gather_s.get(bucket, [longest_s]))
            if left_s < 0:
                return bucket
        return max(buckets - 1, 0)


def gather_order(early: int, forward_order: Sequence[int]) -> list[int]:
    """The first `early` buckets as backward completes them, then the others as forward needs them."""
    return [*range(early), *(bucket for bucket in forward_order if bucket >= early)]
