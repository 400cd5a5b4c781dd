"""Gatherer: the parameter side. An all-gather starts when its shard has stepped and is awaited just before its use."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from holmes.training.overlap.awaited import AwaitedParameters
from holmes.training.overlap.storage import BucketStorage
from holmes.training.overlap.transfers import Lane, Transfer


@contextlib.contextmanager
def _outside_transforms() -> Iterator[None]:
    """Memory is written as if no torch.func transform were under way: one forbids changes of what it did not make."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield
        return
    with temporarily_clear_interpreter_stack():
        yield


@dataclass(frozen=True)
class _Arrival:
    """An all-gather; `is_staged` where its values are not the model's memory yet."""

    transfer: Transfer
    is_staged: bool


class Gatherer:
    """Starts all-gathers in the order `order`, the same on every rank, once each between two `end_step`.

    Those that start before `publish` are early: they gather beside the model's parameters, which keep their values
    until then. After it, and until `wait`, parameters are awaited: any use of one waits for its bucket.
    Not thread-safe, but `wait` is.
    """

    def __init__(self, storages: Sequence[BucketStorage], order: Sequence[int], lane: Lane) -> None:
        if sorted(order) != list(range(len(storages))):
            raise ValueError(f"order={list(order)} must name each of {len(storages)} buckets once")
        self.lane = lane
        self.order = list(order)
        self._storages = storages
        self._awaited = [
            AwaitedParameters(storage.parameters(), functools.partial(self.wait, [bucket]))
            for bucket, storage in enumerate(storages)
        ]
        self._stepped: set[int] = set()
        self._turns = list(order)  # of this step
        self._next = 0
        self._is_published = False
        self._early: dict[int, _Arrival] = {}
        self._under_way: dict[int, _Arrival] = {}
        self._waiting = threading.RLock()

    def stepped(self, bucket: int) -> None:
        """This rank's shard of `bucket` is new."""
        self._stepped.add(bucket)

    @property
    def has_ready(self) -> bool:
        """Whether the all-gather that is next in the order can start."""
        return self._next < len(self._turns) and self._turns[self._next] in self._stepped

    @property
    def started(self) -> int:
        """How many have started in this step."""
        return self._next

    def reorder(self, first: int, order: Sequence[int]) -> None:
        """In this step the turns from the one numbered `first` on are as in `order`, of all buckets."""
        assert first >= self._next
        rest = set(self._turns[first:])
        self._turns[first:] = [bucket for bucket in order if bucket in rest]

    def start_next(self) -> Transfer:
        """Starts the all-gather that is next in the order."""
        bucket = self._turns[self._next]
        storage = self._storages[bucket]
        target = storage.values if self._is_published else storage.staging
        transfer = self.lane.all_gather(bucket, target, storage.place_stepped(target))
        kept = self._under_way if self._is_published else self._early
        kept[bucket] = _Arrival(transfer, is_staged=target is not storage.values)
        self._next += 1
        return transfer

    def start_ready(self) -> None:
        """Starts all that the order allows."""
        while self.has_ready:
            self.start_next()

    def give_up_early(self, started: int) -> None:
        """Collective. What was gathered early in this step is not wanted: `started`, the most that any rank started,
        are brought to their end, and the turns begin anew."""
        while self._next < started:
            self.start_next()
        for arrival in self._early.values():
            arrival.transfer.wait()
        self._early.clear()
        self._stepped.clear()
        self._turns = list(self.order)
        self._next = 0

    def publish(self) -> None:
        """The step has come: what was gathered early is the model's from now on."""
        assert not self._under_way, "a parameter of the step before has not arrived"
        self._is_published = True
        self._under_way.update(self._early)
        self._early.clear()

    def end_step(self) -> None:
        """All buckets have stepped and are under way, or none."""
        assert self._next in (0, len(self._turns)), "an all-gather was not started"
        self._turns = list(self.order)
        self._next = 0
        self._is_published = False
        self._stepped.clear()
        for bucket in self._under_way:
            self._awaited[bucket].begin()
        if self.lane.size == 1:
            self.wait_all()

    def wait(self, buckets: Iterable[int]) -> None:
        """Blocks until the new parameters of `buckets` are there. Raises what their all-gather raised, each time."""
        if not self._under_way:
            return
        with self._waiting, _outside_transforms():
            for bucket in buckets:
                arrival = self._under_way.get(bucket)
                if arrival is None:
                    continue
                arrival.transfer.wait()
                if arrival.is_staged:
                    self._storages[bucket].publish()
                self._awaited[bucket].end()
                del self._under_way[bucket]

    def wait_all(self) -> None:
        """Blocks until every parameter is there."""
        self.wait(list(self._under_way))
