"""The most even spread of a stage's equal layers over its chunks that memory allows, by branch and bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from holmes.planning.partition.problem import Floats, Ints

_MOST_STEPS = 2_000  # of one spread, some 30 us each; in practice tens happen
_ROUNDING = 1e-9


def latest(layers: int, chunks: int, least: int) -> list[int]:
    """The spread that needs least memory: at no moment does a chunk hold more micro-batches than an earlier one."""
    return [least] * (chunks - 1) + [layers - least * (chunks - 1)]


def most_even(layers: int, least: int, moments: Ints, room: Floats, fits: Callable[[Sequence[int]], bool]) -> list[int]:
    """Of the spreads with `least` or more layers in each chunk that fit, that with the least sum of squares.

    `moments`: micro-batches in flight of each chunk, a row for each moment; `room`: for each moment, the layers times
    micro-batches that memory holds, by which spreads are ruled out before `fits` decides. `latest` must fit. After
    _MOST_STEPS steps the best of those seen.
    """
    chunks = moments.shape[1]
    best = latest(layers, chunks, least)
    squares = _squares(best)
    left_to_try: list[tuple[float, list[int]]] = [(0.0, [])]
    bounds = _Bounds(moments, room, layers)
    for _ in range(_MOST_STEPS):
        if not left_to_try:
            break
        bound, first = left_to_try.pop()
        if bound > squares * (1 + _ROUNDING):
            continue
        if len(first) < chunks - 1:
            left_to_try += bounds.longer(first, first[-1] if first else least, squares)
            continue
        spread = [*first, layers - sum(first)]
        if (_squares(spread), spread) < (squares, best) and fits(spread):
            best, squares = spread, _squares(spread)
    return best


class _Bounds:
    """What a spread's first chunks leave possible for the others, where none holds fewer layers than the one before:
    of all orders of a spread that one needs least memory."""

    def __init__(self, moments: Ints, room: Floats, layers: int):
        self.moments = moments
        self.room = room + _ROUNDING * np.abs(room)
        self.layers = layers
        later = [moments[:, place:] for place in range(moments.shape[1] + 1)]
        self.means = [rows.mean(axis=1) if rows.shape[1] else np.zeros(len(rows)) for rows in later]
        self.deviations = [
            np.square(rows - mean[:, None]).sum(axis=1) for rows, mean in zip(later, self.means, strict=True)
        ]

    def longer(self, first: Sequence[int], least: int, most: float) -> list[tuple[float, list[int]]]:
        """`first` with each number of layers of the next chunk that can lead to a sum of squares of `most` or less,
        with a bound of that; the best last.

        The bound: the chunks left share their layers evenly, and are taken out of that just so far that the memory of
        one moment suffices, whichever takes most.
        """
        place, left = len(first), self.layers - sum(first)
        own = np.arange(least, left // (len(self.moments[0]) - place) + 1)
        others = len(self.moments[0]) - place - 1
        rest = left - own
        room = self.room - self.moments[:, :place] @ np.array(first, dtype=np.int64)
        room = room - own[:, None] * self.moments[:, place]
        last = rest - own * (others - 1)
        needed = own[:, None] * self.moments[:, place + 1 : -1].sum(axis=1) + last[:, None] * self.moments[:, -1]
        over = np.maximum(rest[:, None] * self.means[place + 1] - room, 0.0)
        deviation = np.broadcast_to(self.deviations[place + 1], over.shape)
        apart = np.divide(np.square(over), deviation, out=np.zeros_like(over), where=deviation > 0)
        bound = _squares(first) + np.square(own) + np.square(rest) / others + apart.max(axis=1)
        kept = np.flatnonzero((needed <= room).all(axis=1) & (bound <= most * (1 + _ROUNDING)))
        kept = kept[np.argsort(-bound[kept], kind="stable")]
        return [(float(bound[i]), [*first, int(own[i])]) for i in kept]


def _squares(counts: Sequence[int]) -> float:
    return float(sum(count * count for count in counts))
