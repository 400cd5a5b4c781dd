"""Faults of a rank's own set-up: what the rank does to itself before its groups are made, and takes back afterwards."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holmes.lab.stress.faults.preloaded import FaultyCalls
from holmes_comm import _C

_RECORD = b"6:holmes"  # how a rank's record in the store begins; the version follows
_SMALL_BYTES = 64 * 1024
_SPARE_DESCRIPTORS = 3
_DESCRIPTORS = 1024  # what many systems give a process unless told otherwise
_SHM = "/dev/shm"


@contextlib.contextmanager
def tampered(store: Any, tamper: Mapping[str, Any]) -> Iterator[Any]:
    """The store to use, with the named faults in force meanwhile.

    descriptors: none but a few are left. of_1024: the process may have 1024 for the rest of its life, and so many are
    left. memory: so many bytes more than now. killed_on: it is killed on that call of the set-up, or later. file_size:
    files, and memory shared as such, end at 64 KiB. full_shm: a small, full disk lies on /dev/shm. old_version: this
    rank's records say that it speaks the version before. rewritten: so many-th field of this rank's record is another
    one for all who read it, of as many as there are.
    """
    with contextlib.ExitStack() as undo:
        if "descriptors" in tamper:
            held = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
            _lower(undo, resource.RLIMIT_NOFILE, _fill(undo, held) + _SPARE_DESCRIPTORS)
            store = _RoomyStore(store)
        if "of_1024" in tamper:
            resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))
            store = _CrowdedStore(store, undo, tamper["of_1024"])
        if "memory" in tamper:
            undo.enter_context(little_memory(tamper["memory"]))
        if "killed_on" in tamper:
            FaultyCalls.kill_this_process_on(tamper["killed_on"])
        if "file_size" in tamper:
            _lower(undo, resource.RLIMIT_FSIZE, _SMALL_BYTES)
        if "full_shm" in tamper:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", _SHM], check=True)
            undo.callback(subprocess.run, ["umount", _SHM], check=True)
            with contextlib.suppress(OSError):  # full
                Path(_SHM, "filler").write_bytes(bytes(4 * _SMALL_BYTES))
        if "rewritten" in tamper:
            store = _RewrittenRecord(store, tamper["rewritten"])
        yield _OldVersion(store) if "old_version" in tamper else store


@contextlib.contextmanager
def little_memory(spare_bytes: int) -> Iterator[None]:
    """This process may map so much more than now meanwhile (RLIMIT_AS, in whole pages)."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    with contextlib.ExitStack() as undo:
        _lower(undo, resource.RLIMIT_AS, pages * resource.getpagesize() + spare_bytes)
        yield


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


class _CrowdedStore:
    """The store of a process that has no descriptor left but `spare`; it closes some of the others while it works."""

    def __init__(self, store: Any, undo: contextlib.ExitStack, spare: int) -> None:
        self._store, self._spare = store, spare
        self._held: list[int] = []
        self._fill()
        undo.callback(self._close)

    def _fill(self) -> None:
        with contextlib.suppress(OSError):  # EMFILE: all are taken
            while True:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        self._release(self._spare)

    def _close(self) -> None:
        self._release(len(self._held))

    def _release(self, count: int) -> None:
        for descriptor in self._held[len(self._held) - count :]:
            os.close(descriptor)
        del self._held[len(self._held) - count :]

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            self._release(min(_SPARE_DESCRIPTORS, len(self._held)))
            try:
                return operation(*arguments)
            finally:
                for _ in range(_SPARE_DESCRIPTORS):
                    with contextlib.suppress(OSError):
                        self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

        return call


class _OldVersion:
    """The store as a rank of the version before would write to it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.get, self.check, self.wait = store.get, store.check, store.wait

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        if data.startswith(_RECORD):
            magic, version, *rest = _fields_of(data)
            data = _bytes_of([magic, b"%d" % (int(version) - 1), *rest])
        self._store.set(key, data)


class _RewrittenRecord:
    """A store that changes one field of the record that this rank writes, as who can write the store may."""

    def __init__(self, store: Any, field: int) -> None:
        self._store, self._field = store, field
        self.get, self.check, self.wait = store.get, store.check, store.wait

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, rewritten(data, self._field) if data.startswith(_RECORD) else data)


def rewritten(record: bytes, field: int) -> bytes:
    """A rank's record with another value in one of its fields, each of which its seal follows; others as they are."""
    *header, content = _fields_of(record)
    if header[2:3] != [b"rank"]:
        return record
    fields = _fields_of(content)
    at = 2 * (field % (len(fields) // 2))
    fields[at] = (b"0" if fields[at] != b"0" else b"1") if fields[at].isdigit() else fields[at] + b"x"
    return _bytes_of([*header, _bytes_of(fields)])


def _fields_of(record: bytes) -> list[bytes]:
    """As `FieldWriter` of the engine writes them: the length, a colon, the bytes."""
    fields = []
    while record:
        length, _, rest = record.partition(b":")
        fields.append(rest[: int(length)])
        record = rest[int(length) :]
    return fields


def _bytes_of(fields: list[bytes]) -> bytes:
    return b"".join(b"%d:%s" % (len(field), field) for field in fields)
