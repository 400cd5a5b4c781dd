"""A set-up that failed is tried again under the same name: whoever tries first, late, or had not come at all."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from helpers.ranks import run_threads

import holmes_comm


class WatchedStore:
    """A store that says when somebody looks at the key under which rank 0 begins a try, and how often it did."""

    def __init__(self) -> None:
        self._inner = holmes_comm.LocalStore()
        self._changed = threading.Condition()
        self._sets = 0
        self._looks = 0

    def set(self, key: str, value: bytes) -> None:
        self._inner.set(key, value)
        if key.endswith("/attempt"):
            with self._changed:
                self._sets += 1
                self._changed.notify_all()

    def get(self, key: str) -> bytes:
        return self._inner.get(key, 10.0)

    def wait(self, keys: list[str], timeout: Any) -> None:
        if keys[0].endswith("/attempt"):
            with self._changed:
                self._looks += 1
                self._changed.notify_all()
        for key in keys:
            self._inner.wait(key, timeout.total_seconds())

    def await_tries(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._sets >= count, 20)

    def await_more_looks(self) -> None:
        with self._changed:
            before = self._looks
            assert self._changed.wait_for(lambda: self._looks >= before + 2, 20)


def connect(store: Any, rank: int, size: int, timeout_s: float = 20.0, **options: Any) -> Any:
    return holmes_comm.init(store, rank, size, transport="tcp", name="again", connect_timeout_s=timeout_s, **options)


def sum_of(comm: Any) -> float:
    data = np.full(3, comm.rank + 1.0)
    comm.all_reduce(data)
    comm.barrier()
    return float(data[1])


def fail(store: Any, rank: int, size: int) -> None:
    """On ranks 0 and 1: they differ."""
    with pytest.raises(holmes_comm.UsageError, match="integrity"):
        connect(store, rank, size, options=holmes_comm.CommunicatorOptions(integrity=rank == 1))


@pytest.mark.parametrize("failures", [1, 3])
@pytest.mark.parametrize("where", ["at the choice of NICs", "at the comparison of options"])
def test_all_try_again(where: str, failures: int) -> None:
    store = holmes_comm.LocalStore()

    def wrong(rank: int) -> dict[str, Any]:
        if where == "at the choice of NICs":
            return {"nics": holmes_comm.NicSelection.parse("nosuch0") if rank == 1 else None}
        return {"options": holmes_comm.CommunicatorOptions(integrity=rank == 1)}

    def body(rank: int) -> float:
        for _ in range(failures):
            with pytest.raises(holmes_comm.HolmesError, match=r"nosuch0|integrity"):
                connect(store, rank, 2, **wrong(rank))
        return sum_of(connect(store, rank, 2))

    assert run_threads(2, body) == [3.0] * 2


@pytest.mark.parametrize("first", [0, 1])
def test_one_rank_tries_again_before_the_other(first: int) -> None:
    store = WatchedStore()

    def body(rank: int) -> float:
        fail(store, rank, 2)
        if rank != first:
            if first == 0:
                store.await_tries(2)
            else:
                store.await_more_looks()
        return sum_of(connect(store, rank, 2))

    assert run_threads(2, body) == [3.0] * 2


@pytest.mark.parametrize("comes", ["before the others try again", "after the others have begun again"])
def test_a_rank_that_had_not_come_joins_the_next_try(comes: str) -> None:
    store = WatchedStore()
    others_have_failed, has_heard = threading.Barrier(3), threading.Event()

    def body(rank: int) -> float:
        if rank != 2:
            with pytest.raises(holmes_comm.TimeoutError, match="rank 2"):
                connect(store, rank, 3, timeout_s=1.0)
        others_have_failed.wait(20)
        if comes == "after the others have begun again":
            if rank == 2:
                store.await_tries(2)
        elif rank == 2:  # at once: not after its own deadline
            with pytest.raises(holmes_comm.TimeoutError, match=r"rank 2 of 3 did not take part .* within 1"):
                connect(store, rank, 3, timeout_s=1000.0)
            has_heard.set()
        else:
            assert has_heard.wait(20)
        return sum_of(connect(store, rank, 3))

    assert run_threads(3, body) == [6.0] * 3


def test_a_name_is_used_again_after_a_set_up_that_succeeded() -> None:
    store = holmes_comm.LocalStore()

    def body(rank: int) -> list[float]:
        sums = []
        for _ in range(3):
            comm = connect(store, rank, 2)
            sums.append(sum_of(comm))
            del comm
        return sums

    assert run_threads(2, body) == [[3.0] * 3] * 2


def test_who_tries_again_alone_is_told_what_to_do() -> None:
    store = holmes_comm.LocalStore()

    def body(rank: int) -> None:
        fail(store, rank, 2)
        if rank == 1:
            with pytest.raises(holmes_comm.TimeoutError, match=r"rank 0 .* again within 0\.5.* or use a new name"):
                connect(store, rank, 2, timeout_s=0.5)

    run_threads(2, body)


def test_without_rank_0_the_others_name_it() -> None:
    with pytest.raises(holmes_comm.TimeoutError, match="rank 0 of communicator 'holmes/again' did not begin"):
        connect(holmes_comm.LocalStore(), 1, 2, timeout_s=0.5)
