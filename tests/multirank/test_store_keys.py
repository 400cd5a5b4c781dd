"""What set-ups leave in the store: a job makes many communicators with one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_threads

import holmes_comm


class DictStore:
    """The methods of a c10d store that set-ups use."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: all(key in self.values for key in keys), timeout.total_seconds()):
                raise TimeoutError("timed out")

    def delete_key(self, key: str) -> bool:
        with self.changed:
            return self.values.pop(key, None) is not None


class KeepingStore(DictStore):
    def delete_key(self, key: str) -> bool:
        raise NotImplementedError("this store deletes nothing")


def make_many(store: Any, size: int, count: int) -> None:
    def body(rank: int) -> None:
        for number in range(count):
            comm = holmes_comm.init(store, rank, size, name=f"job{number}", transport="tcp", connect_timeout_s=60.0)
            half = comm.split(rank % 2)
            for one in (comm, half):
                data = np.ones(2)
                one.all_reduce(data)
                assert data[0] == one.size

    run_threads(size, body, timeout_s=120)


@pytest.mark.parametrize("size", [2, 5])
def test_little_stays_of_a_communicator(size: int) -> None:
    store = DictStore()
    make_many(store, size, 3)
    # Of each: the try, what was chosen, that it is over; not what every rank wrote.
    assert len(store.values) <= 3 * (5 + 2 * 2), sorted(store.values)
    assert max(len(value) for value in store.values.values()) < 1000


def test_a_store_that_deletes_nothing_will_do() -> None:
    store = KeepingStore()
    make_many(store, 3, 2)
    assert any(key.endswith("rank/1") for key in store.values)


def hash_store(_: Path) -> Any:
    return pytest.importorskip("torch.distributed").HashStore()


def file_store(folder: Path) -> Any:
    return pytest.importorskip("torch.distributed").FileStore(str(folder / "store"), 1)


def tcp_store(_: Path) -> Any:
    return pytest.importorskip("torch.distributed").TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("make", [hash_store, file_store, tcp_store])
def test_stores_of_torch(make: Callable[[Path], Any], tmp_path: Path) -> None:
    store = make(tmp_path)
    first = store.num_keys()
    make_many(store, 4, 2)
    assert store.num_keys() - first <= 2 * (5 + 2 * 2)
