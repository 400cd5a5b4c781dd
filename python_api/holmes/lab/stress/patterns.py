"""Data whose results are known: every element depends on seed, group, operation, rank and place.

Value of rank r at place i: table_r[base[i]]. `base` holds random bytes, the same for all; `table_r` 256 random whole
numbers below 256, of this operation and rank. Sums over ranks are then sums of tables: whole numbers, exact in all
types used. A piece at a wrong place, of another rank or operation, twice or not at all changes the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
DTYPES = ("float32", "float64", "int32", "int64")


class Patterns:
    """Data of one group. Not thread-safe. `max_count`: most elements of one rank's part; `group`: a number."""

    def __init__(self, seed: int, group: int, max_count: int) -> None:
        self._key = (seed, group)
        self._base = np.random.default_rng(seed).integers(0, 256, max_count, dtype=np.uint8)

    def table(self, operation: int, rank: int) -> npt.NDArray[np.int64]:
        """The 256 values of one rank in one operation."""
        return np.random.default_rng((*self._key, operation, rank)).integers(0, 256, 256, dtype=np.int64)

    def data(self, operation: int, rank: int, start: int, count: int, dtype: str) -> Array:
        """What a rank contributes, places `start` to `start + count`."""
        return np.take(self.table(operation, rank).astype(dtype), self._base[start : start + count])

    def total(self, operation: int, ranks: Iterable[int], start: int, count: int, dtype: str) -> Array:
        """The sum over these ranks, same places."""
        table = np.sum([self.table(operation, rank) for rank in ranks], axis=0)
        return np.take(table.astype(dtype), self._base[start : start + count])
