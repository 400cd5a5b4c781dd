"""A rendezvous in a folder that all ranks of one machine see: no network, no server, nothing that a fault can take."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

_POLL_S = 0.005


class FolderStore:
    """set, get, wait, check, as the stores of torch.distributed; one file for each key. Thread-safe."""

    def __init__(self, folder: str | Path) -> None:
        """`folder` is made where it does not exist."""
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def below(self, name: str) -> FolderStore:
        """A store of its own, in a folder below this one."""
        return FolderStore(self._folder / quote(name, safe=""))

    def set(self, key: str, value: bytes | str) -> None:
        """Sets a key, at once for all readers; overwrites."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        path = self._path(key)
        partial = path.with_name(f"{path.name}.{os.getpid()}-{time.monotonic_ns()}~")
        partial.write_bytes(data)
        partial.rename(path)

    def get(self, key: str) -> bytes:
        """The bytes of a key; waits for it as `wait` does."""
        self.wait([key])
        return self._path(key).read_bytes()

    def delete(self, key: str) -> None:
        """Takes a key away, where it is there."""
        self._path(key).unlink(missing_ok=True)

    def check(self, keys: Iterable[str]) -> bool:
        """Whether all keys are there."""
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: Iterable[str], timeout: timedelta | float = 60.0) -> None:
        """Waits until all keys are there. Raises TimeoutError naming those that are not."""
        limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        keys, end_s = list(keys), time.monotonic() + limit_s
        while not self.check(keys):
            if time.monotonic() >= end_s:
                raise TimeoutError(
                    f"timeout: after {limit_s:g} s {[key for key in keys if not self.check([key])]} miss"
                )
            time.sleep(_POLL_S)

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")
