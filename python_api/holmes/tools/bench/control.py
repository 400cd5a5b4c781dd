"""How the ranks of a benchmark agree, beside the libraries under test."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from holmes.cluster.probe import Exchange

Samples = NDArray[np.float64]


class Control:
    """Barriers and exchange of samples over the store all ranks share. Not thread-safe."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self._store = store
        self._exchange = Exchange(store, rank, ranks, "bench")

    def gather(self, samples: Samples) -> Samples:
        """Collective. Returns every rank's float64 samples, one row for each rank, on every rank."""
        return np.array(self._exchange.all_gather(samples.tolist()))

    def maximum(self, samples: Samples) -> Samples:
        """Collective. Returns the element-wise maximum over ranks: an operation is over when its last rank is."""
        slowest: Samples = self.gather(samples).max(axis=0)
        return slowest

    def barrier(self) -> None:
        """Collective. Returns when every rank has come here."""
        self.gather(np.zeros(1))

    def leave(self) -> None:
        """Collective. The last call: rank 0, which may serve the store, returns after all others are done with it."""
        self._store.set(f"bench/left/{self.rank}", b"1")
        if self.rank == 0:
            for rank in range(self.ranks):
                self._store.get(f"bench/left/{rank}")
