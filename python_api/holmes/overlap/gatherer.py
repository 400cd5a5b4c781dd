"""Gatherer: the parameter side. An all-gather starts when its shard has stepped and is awaited just before its use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from holmes.overlap.storage import BucketStorage
from holmes.overlap.transfers import Lane, Transfer


class Gatherer:
    """Starts all-gathers in the order `order`, the same on every rank, once each between two `end_step`.

    Not thread-safe.
    """

    def __init__(self, storages: Sequence[BucketStorage], order: Sequence[int], lane: Lane) -> None:
        if sorted(order) != list(range(len(storages))):
            raise ValueError(f"order={list(order)} must name each of {len(storages)} buckets once")
        self.lane = lane
        self.order = list(order)
        self._storages = storages
        self._stepped: set[int] = set()
        self._turns = list(order)  # of this step
        self._next = 0
        self._under_way: dict[int, Transfer] = {}

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
        """Starts the all-gather that is next in the order, which must be ready."""
        bucket = self._turns[self._next]
        storage = self._storages[bucket]
        self._under_way[bucket] = transfer = self.lane.all_gather(bucket, storage.values, storage.value_shard)
        self._next += 1
        return transfer

    def start_ready(self) -> None:
        """Starts all that the order allows."""
        while self.has_ready:
            self.start_next()

    def end_step(self) -> None:
        """All buckets have stepped, or none."""
        assert self._next in (0, len(self._turns)), "an all-gather was not started"
        self._turns = list(self.order)
        self._next = 0
        self._stepped.clear()

    def wait(self, buckets: Iterable[int]) -> None:
        """Blocks until the new parameters of `buckets` are there."""
        for bucket in buckets:
            transfer = self._under_way.pop(bucket, None)
            if transfer is not None:
                transfer.wait()

    def wait_all(self) -> None:
        """Blocks until every parameter is there."""
        self.wait(list(self._under_way))


class ForwardGate:
    """Forward pre-hooks that make each module wait for the buckets it needs, in the order of their arrival."""

    def __init__(self, gatherer: Gatherer, needs: Mapping[nn.Module, Sequence[int]]) -> None:
        self._gatherer = gatherer
        place = {bucket: position for position, bucket in enumerate(gatherer.order)}
        self._handles = []
        for module, buckets in needs.items():
            ordered = sorted(set(buckets), key=place.__getitem__)

            def hook(_module: nn.Module, _inputs: Any, ordered: Sequence[int] = ordered) -> None:
                gatherer.wait(ordered)

            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
