"""All ranks exchange what they know, through the store that the job already has."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any, Protocol


class KeyValueStore(Protocol):
    """What a rendezvous must do; every torch.distributed Store does. `get` waits until the key is set."""

    def set(self, key: str, value: str, /) -> None:
        """Sets a key."""

    def get(self, key: str, /) -> bytes:
        """The value of a key, waiting for it."""


class Exchange:
    """All-gather of JSON values through a store, in O(ranks) keys. Not thread-safe; `name` is unique in the store."""

    def __init__(self, store: KeyValueStore, rank: int, size: int, name: str) -> None:
        self.rank = rank
        self._store = store
        self._size = size
        self._name = name
        self._round = 0

    def all_gather(self, value: Any) -> list[Any]:
        """Collective. The values of all ranks, by rank. Blocks as long as the store's own timeout allows."""
        prefix = f"{self._name}/{self._round}"
        self._round += 1
        self._store.set(f"{prefix}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            values = [json.loads(self._store.get(f"{prefix}/{rank}")) for rank in range(self._size)]
            # Every rank reads it: packed, as the hosts' values are much alike.
            packed = base64.b64encode(zlib.compress(json.dumps(values).encode(), 1)).decode()
            self._store.set(f"{prefix}/all", packed)
        gathered: list[Any] = json.loads(zlib.decompress(base64.b64decode(self._store.get(f"{prefix}/all"))))
        return gathered
