"""Reducer: the gradient side. A bucket's reduce-scatter starts when the last of its gradients is ready."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from holmes.overlap.parameters import Trained
from holmes.overlap.storage import BucketStorage
from holmes.overlap.transfers import Lane, Transfer


class Reducer:
    """Starts the buckets' reduce-scatters in their order, the same on every rank. Not thread-safe.

    `expected[i]` is how many gradients parameter i gets between two steps; 0 where it got none so far: its bucket
    starts with `finish`.
    """

    def __init__(
        self, storages: Sequence[BucketStorage], trained: Sequence[Trained], expected: Sequence[int], lane: Lane
    ) -> None:
        self.lane = lane
        self.expected = list(expected)
        self.transfers: list[Transfer] = []  # of the buckets started in this step, in order
        self._storages = storages
        self._trained = trained
        self._bucket_of = {slot.parameter: b for b, storage in enumerate(storages) for slot in storage.bucket.slots}
        self._seen = [0] * len(trained)
        self._unready = [len(storage.bucket.slots) for storage in storages]
        self._missing: set[int] = set()  # parameters without a gradient on this rank
        self._flags: torch.Tensor | None = None
        self._flags_transfer: Transfer | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no gradient of a new step has come yet."""
        return not self.transfers and not any(storage.written for storage in self._storages)

    def on_gradient(self, index: int, *, is_counted: bool) -> bool:
        """Parameter `index` accumulated a gradient, `is_counted` unless more are announced (no_sync).

        Returns whether a reduce-scatter started. Raises RuntimeError where its bucket has already been sent.
        """
        bucket = self._bucket_of[index]
        if bucket < len(self.transfers):
            raise RuntimeError(
                f"parameter {self._trained[index].name!r} got another gradient after {self.expected[index]} of this "
                "step, with which its bucket was sent. A step has as many backward passes as the first one had; where "
                "that changes, give accumulation_steps (and set it before the first backward pass), or run all but the "
                "last in no_sync(). After a backward pass whose gradients are not wanted call zero_grad()"
            )
        self._storages[bucket].take_gradient(index)
        if not is_counted:
            return False
        self._seen[index] += 1
        if self._seen[index] == self.expected[index]:
            self._unready[bucket] -= 1
        before = len(self.transfers)
        while len(self.transfers) < len(self._storages) and self._unready[len(self.transfers)] == 0:
            self._start()
        return len(self.transfers) > before

    def finish(self, gathered: int) -> None:
        """Collective. Backward is over: starts what is left, and tells the others which parameters had no gradient.

        `gathered`: all-gathers that this rank has started, for `most_gathered`.
        """
        while len(self.transfers) < len(self._storages):
            self._start()
        if self.lane.size > 1:
            if self._flags_transfer is not None:
                self._flags_transfer.wait()  # of an earlier step: raises what went wrong there
            flags = torch.ones(len(self._trained) + 1, dtype=torch.int32, device=self._storages[0].values.device)
            flags[-1] = gathered
            if self._missing:
                flags[sorted(self._missing)] = 0
            self._flags = flags
            self._flags_transfer = self.lane.all_reduce("used parameters", flags, dist.ReduceOp.MAX)

    def unused(self, bucket: int) -> frozenset[int]:
        """Parameters of `bucket` without gradient on any rank. After `finish`; waits only if one is missing here."""
        candidates = {slot.parameter for slot in self._storages[bucket].bucket.slots} & self._missing
        if candidates and self._flags_transfer is not None:
            flags = self._agreed_flags().tolist()
            candidates = {index for index in candidates if not flags[index]}
        return frozenset(candidates)

    def most_gathered(self) -> int:
        """The largest `gathered` of all ranks. After `finish`; waits for them."""
        return int(self._agreed_flags()[-1])

    def reset(self) -> None:
        """Ends the step: waits for what is under way and forgets the gradients."""
        for transfer in self.transfers:
            transfer.wait()
        self.transfers.clear()
        self._missing.clear()
        for bucket, storage in enumerate(self._storages):
            storage.clear()
            self._unready[bucket] = len(storage.bucket.slots)
        self._seen = [0] * len(self._trained)

    def _agreed_flags(self) -> torch.Tensor:
        assert self._flags_transfer is not None
        assert self._flags is not None
        self._flags_transfer.wait()
        return self._flags

    def _start(self) -> None:
        bucket = len(self.transfers)
        storage = self._storages[bucket]
        self._missing.update(storage.close())
        self.transfers.append(self.lane.reduce_scatter(bucket, storage.gradient_shard, storage.gradients))
