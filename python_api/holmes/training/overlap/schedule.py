"""Schedule: the order of the all-gathers, planned from what the first steps measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from holmes.training.overlap.transfers import ALL_GATHER, REDUCE_SCATTER, Transfer

OBSERVED_STEPS = 4  # the first of them, which backward did not overlap, is not used
_MARGIN = 1.1  # of an all-gather's time: it shares the link with the reduce-scatters of the backward pass


@dataclass(frozen=True)
class BucketTimes:
    """Of one bucket: when its gradients are complete, counted from those of the first bucket, and what its collectives
    take. Nanoseconds."""

    ready_ns: int
    reduce_ns: int
    gather_ns: int


class StepObserver:
    """Gathers the times of each bucket over a few steps whose all-gathers all ran after backward. Not thread-safe."""

    def __init__(self, buckets: int) -> None:
        self._ready_s: list[list[float]] = [[] for _ in range(buckets)]
        self._taken_s: dict[str, list[list[float]]] = {
            kind: [[] for _ in range(buckets)] for kind in (REDUCE_SCATTER, ALL_GATHER)
        }
        self._steps = 0

    @property
    def is_full(self) -> bool:
        """Whether enough steps were observed."""
        return self._steps >= OBSERVED_STEPS

    def observe(self, reduced: Sequence[Transfer], ended: Sequence[tuple[Transfer, float]]) -> None:
        """One step: its reduce-scatters in order, and what ended in it with the times at which it began to run."""
        self._steps += 1
        if self._steps == 1:
            return
        for transfer in reduced:
            self._ready_s[transfer.bucket].append(transfer.submitted_s - reduced[0].submitted_s)
        for transfer, start_s in ended:
            if transfer.kind in self._taken_s:
                self._taken_s[transfer.kind][transfer.bucket].append((transfer.ended_s or start_s) - start_s)

    def times(self) -> list[BucketTimes]:
        """The medians."""
        rows = (self._ready_s, self._taken_s[REDUCE_SCATTER], self._taken_s[ALL_GATHER])
        return [
            BucketTimes(*(round(statistics.median(row[bucket] or [0.0]) * 1e9) for row in rows))
            for bucket in range(len(self._ready_s))
        ]


def gather_order(times: Sequence[BucketTimes], forward_order: Sequence[int]) -> list[int]:
    """The order in which the all-gathers start, the same on every rank where `times` (by bucket, in the order of
    backward) are.

    One link carries everything. A reduce-scatter goes first: what it belongs to is needed sooner than all that was
    reduced before it. Where the link would stand idle until the next one is ready, it carries the all-gather, of those
    whose reduce-scatter has ended, that forward needs first ("earliest deadline first"). So every part of the model has
    some of its parameters before forward begins, and the rest keeps ahead of it: were the first buckets of backward
    (the last of forward) gathered whole, forward would begin with all the others still to come.
    """
    place = {bucket: position for position, bucket in enumerate(forward_order)}
    reduced: list[int] = []  # and not gathered yet
    order: list[int] = []
    now_ns, following = 0.0, 0
    while len(order) < len(times):
        if following < len(times) and (times[following].ready_ns <= now_ns or not reduced):
            now_ns = max(now_ns, times[following].ready_ns) + times[following].reduce_ns
            reduced.append(following)
            following += 1
        else:
            bucket = min(reduced, key=place.__getitem__)
            reduced.remove(bucket)
            order.append(bucket)
            now_ns += _MARGIN * times[bucket].gather_ns
    return order
