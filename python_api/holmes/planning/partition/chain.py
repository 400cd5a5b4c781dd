"""Dynamic programming over contiguous parts: the least maximum, then the least sum of squares."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from holmes.planning.partition.problem import Floats, Ints

Table = Callable[[int], Floats]


def least_maximum(parts: int, size: int, cost: Table) -> float:
    """The least maximum cost of `parts` consecutive parts from position 0 to size - 1; inf where none is possible.

    `cost(i)[j, k]` is part i from position j to k, inf where that may not be.
    """
    reach = np.full(size, np.inf)
    reach[0] = -np.inf
    for part in range(parts):
        reach = np.maximum(reach[:, None], cost(part)).min(axis=0)
    return float(reach[-1])


def best_chain(parts: int, size: int, cost: Table) -> tuple[int, ...] | None:
    """Positions 0 to size - 1, parts + 1 of them, of the least maximum cost, then the least sum of squares above 0.

    None where no chain is possible. Tables are asked for twice rather than kept: memory O(size^2).
    """
    most = least_maximum(parts, size, cost)
    if most == np.inf:
        return None
    total = np.full(size, np.inf)
    total[0] = 0.0
    chosen: list[Ints] = []
    for part in range(parts):
        table = cost(part)
        step = np.where(table <= most, np.square(np.maximum(table, 0.0)), np.inf)
        step += total[:, None]
        chosen.append(step.argmin(axis=0))
        total = step.min(axis=0)
    positions = [size - 1]
    for origin in reversed(chosen):
        positions.append(int(origin[positions[-1]]))
    return tuple(reversed(positions))
