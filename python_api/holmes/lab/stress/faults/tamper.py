"""Faults of a rank's own set-up: what the rank does to itself before its groups are made, and takes back afterwards."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holmes_comm import _C

_VERSION_FIELD = b"6:holmes1:"  # of a rank's record in the store, followed by the version's digit
_SMALL_BYTES = 64 * 1024
_SPARE_DESCRIPTORS = 3
_SHM = "/dev/shm"


@contextlib.contextmanager
def tampered(store: Any, tamper: Mapping[str, Any]) -> Iterator[Any]:
    """The store to use, with the named faults in force meanwhile.

    descriptors: none but a few are left. file_size: files, and memory shared as such, end at 64 KiB. full_shm: a small,
    full disk lies on /dev/shm. old_version: this rank's records say that it speaks the version before.
    """
    with contextlib.ExitStack() as undo:
        if "descriptors" in tamper:
            held = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
            _lower(undo, resource.RLIMIT_NOFILE, _fill(undo, held) + _SPARE_DESCRIPTORS)
            store = _RoomyStore(store)
        if "file_size" in tamper:
            _lower(undo, resource.RLIMIT_FSIZE, _SMALL_BYTES)
        if "full_shm" in tamper:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", _SHM], check=True)
            undo.callback(subprocess.run, ["umount", _SHM], check=True)
            with contextlib.suppress(OSError):  # full
                Path(_SHM, "filler").write_bytes(bytes(4 * _SMALL_BYTES))
        yield _OldVersion(store) if "old_version" in tamper else store


def make_records_hang() -> None:
    """Whoever writes this process's flight record waits from now on: a FIFO that nobody reads is in its place."""
    path = Path(os.environ["HOLMES_FLIGHT_RECORDER_DIR"], f"{_C.host_name()}-{os.getpid()}.json.part")
    if not path.is_fifo():
        with contextlib.suppress(FileExistsError):  # one is being written
            os.mkfifo(path)


def _fill(undo: contextlib.ExitStack, held: int) -> int:
    """Takes the numbers below `held` that are free. Returns the first free one."""
    while True:
        descriptor = os.open(os.devnull, os.O_RDONLY)
        if descriptor >= held:
            os.close(descriptor)
            return descriptor
        undo.callback(os.close, descriptor)


def _lower(undo: contextlib.ExitStack, limit: int, soft: int) -> None:
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (soft, before[1]))
    undo.callback(resource.setrlimit, limit, before)


class _RoomyStore:
    """The store with the limit of descriptors lifted while it works: a real one has its connection already."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            try:
                return operation(*arguments)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        return call


class _OldVersion:
    """The store as a rank of the version before would write to it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.get, self.check, self.wait = store.get, store.check, store.wait

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        if data.startswith(_VERSION_FIELD):
            at = len(_VERSION_FIELD)
            data = _VERSION_FIELD + b"%d" % (int(data[at : at + 1]) - 1) + data[at + 1 :]
        self._store.set(key, data)
