"""Reducer: the gradient side. A bucket's reduce-scatter starts when the last of its gradients is ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from holmes.training.overlap.parameters import Trained
from holmes.training.overlap.sent import SentGradient, SpentGradient
from holmes.training.overlap.storage import BucketStorage
from holmes.training.overlap.transfers import Lane, Transfer


class Reducer:
    """Starts the buckets' reduce-scatters in their order, the same on every rank. Not thread-safe.

    `expected[i]` is how many gradients parameter i gets between two steps; 0 where it got none so far: its bucket
    starts with `start_rest`. `before_use(bucket)` is called before the memory of a bucket's gradients is written. This
    rank's gradients are sent times `weight`.
    """

    def __init__(
        self,
        storages: Sequence[BucketStorage],
        trained: Sequence[Trained],
        expected: Sequence[int],
        lane: Lane,
        before_use: Callable[[int], None],
        weight: float = 1.0,
    ) -> None:
        self.lane = lane
        self.expected = list(expected)
        self.transfers: list[Transfer] = []  # of the buckets started in this step, in order
        self._storages = storages
        self._trained = trained
        self._before_use = before_use
        self._weight = weight
        self._bucket_of = {slot.parameter: b for b, storage in enumerate(storages) for slot in storage.bucket.slots}
        self._seen = [0] * len(trained)
        self._unready = [len(storage.bucket.slots) for storage in storages]
        self._missing: set[int] = set()  # parameters without a gradient on this rank
        self._displaced: set[int] = set()  # buckets of which a parameter's .data was replaced when they were sent
        #: The gradient that came last. It is taken with the next one: hooks of others, registered later, see it first.
        self._latest: tuple[int, bool] | None = None
        self._had_gradient: list[int] = []  # by parameter, whether any rank has one in this step

    @property
    def is_idle(self) -> bool:
        """Whether no gradient of a new step has come yet."""
        return not self.transfers and self._latest is None and not any(s.written for s in self._storages)

    @property
    def has_counted(self) -> bool:
        """Whether a gradient has come since the last step that was not announced as one of several (no_sync)."""
        return bool(self.transfers) or any(self._seen) or (self._latest is not None and self._latest[1])

    @property
    def unsent(self) -> list[int]:
        """Parameters whose bucket has not been sent in this step."""
        return [slot.parameter for storage in self._storages[len(self.transfers) :] for slot in storage.bucket.slots]

    def is_sent(self, index: int) -> bool:
        """Whether the bucket of parameter `index` has been sent in this step."""
        return self._bucket_of[index] < len(self.transfers)

    def on_gradient(self, index: int, *, is_counted: bool) -> None:
        """Parameter `index`, whose bucket is not sent, accumulated a gradient; `is_counted` unless more are announced.

        What it makes ready starts with the next gradient, or with `flush`.
        """
        self.flush()
        self._latest = (index, is_counted)

    def flush(self) -> None:
        """Takes the last gradient, and starts the reduce-scatters that are ready."""
        if self._latest is None:
            return
        (index, is_counted), self._latest = self._latest, None
        gradient = self._trained[index].tensor.grad
        if gradient is not None and not isinstance(gradient, SentGradient) and gradient.requires_grad:
            return  # of backward(create_graph=True): its graph may be needed until `step`, which takes it
        bucket = self._bucket_of[index]
        self._before_use(bucket)
        self._storages[bucket].take_gradient(index)
        if not is_counted:
            return
        self._seen[index] += 1
        if self._seen[index] == self.expected[index]:
            self._unready[bucket] -= 1
        while len(self.transfers) < len(self._storages) and self._unready[len(self.transfers)] == 0:
            self._start()

    def start_rest(self, *, checks: bool = True) -> None:
        """Collective. Backward is over: starts what is left. `checks`: raises as BucketStorage.is_in_place."""
        self.flush()
        while len(self.transfers) < len(self._storages):
            self._start(checks=checks)

    def agree(self, words: Sequence[int], lane: Lane) -> list[int]:
        """Collective over `lane`, after `start_rest`: which parameters had a gradient (see `unused`), and the greatest
        of each of `words`, as many on every rank, none below 0. Blocks; returns those."""
        flags = torch.ones(len(self._trained) + len(words), dtype=torch.int32, device=self._storages[0].values.device)
        flags[len(self._trained) :] = torch.tensor(words, dtype=torch.int32)
        if self._missing:
            flags[sorted(self._missing)] = 0
        lane.all_reduce("used parameters", flags, dist.ReduceOp.MAX).wait()
        self._had_gradient = flags.tolist()
        return self._had_gradient[len(self._trained) :]

    def is_certain(self, bucket: int) -> bool:
        """Whether `bucket`, which was sent, will step with what it has now: not where a hook took a gradient away (the
        parameter may be unused on all ranks), nor where .data was replaced (it may be put back before `step`)."""
        slots = self._storages[bucket].bucket.slots
        return bucket not in self._displaced and self._missing.isdisjoint(slot.parameter for slot in slots)

    def unused(self, bucket: int) -> frozenset[int]:
        """Parameters of `bucket` without gradient on any rank. After `agree`."""
        candidates = {slot.parameter for slot in self._storages[bucket].bucket.slots} & self._missing
        return frozenset(index for index in candidates if not self._had_gradient[index])

    @property
    def with_gradient(self) -> list[int]:
        """Parameters that have a gradient on some rank. After `agree`."""
        return [index for index in range(len(self._trained)) if self._had_gradient[index]]

    def disturbed(self) -> tuple[list[int], list[int]]:
        """Parameters whose gradient was sent and whose .grad was set to None since, and to something else."""
        cleared, replaced = [], []
        for storage in self._storages[: len(self.transfers)]:
            some_cleared, some_replaced = storage.disturbed()
            cleared += some_cleared
            replaced += some_replaced
        return cleared, replaced

    @property
    def has_gradients(self) -> bool:
        """Whether this rank has anything to step with."""
        return not self.is_idle or any(
            entry.tensor.grad is not None and not isinstance(entry.tensor.grad, SpentGradient)
            for entry in self._trained
        )

    @property
    def spent(self) -> list[int]:
        """Parameters that still have the gradient with which the last step was made."""
        return [i for i, entry in enumerate(self._trained) if isinstance(entry.tensor.grad, SpentGradient)]

    @property
    def is_cleared(self) -> bool:
        """Whether gradients have come since the last step, and .grad of every parameter was set to None since."""
        return not self.is_idle and all(entry.tensor.grad is None for entry in self._trained)

    def reset(self, *, is_stepped: bool = False) -> None:
        """Ends the step: waits for what is under way and forgets the gradients.

        `is_stepped`: a parameter that was not counted on so far, and got as many gradients as others, is from now on.
        """
        for transfer in self.transfers:
            transfer.wait()
        self.transfers.clear()
        self._missing.clear()
        self._displaced.clear()
        self._latest = None
        if is_stepped:
            usual = max(self.expected)
            self.expected = [
                old or (seen if seen == usual else 0) for old, seen in zip(self.expected, self._seen, strict=True)
            ]
        for bucket, storage in enumerate(self._storages):
            storage.clear(is_stepped=is_stepped)
            self._unready[bucket] = len(storage.bucket.slots)
        self._seen = [0] * len(self._trained)

    def _start(self, *, checks: bool = True) -> None:
        bucket = len(self.transfers)
        storage = self._storages[bucket]
        self._before_use(bucket)
        if checks and not storage.is_in_place():
            self._displaced.add(bucket)
        self._missing.update(storage.close())
        if self._weight != 1.0:
            storage.gradients.mul_(self._weight)
        self.transfers.append(self.lane.reduce_scatter(bucket, storage.gradient_shard, storage.gradients))
