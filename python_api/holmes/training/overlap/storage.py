"""Storage: the memory of one bucket. The model's parameters become views of it; gradients gather in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

import holmes_comm
from holmes.training.overlap.buckets import Bucket
from holmes.training.overlap.parameters import Trained, bucket_addresses
from holmes.training.overlap.sent import HeldGradient, SentGradient, SpentGradient, dense

#: Of a bucket's gradients: a cache line.
_ALIGNMENT_BYTES = 64
#: Odd, so that the rows' sums tell when the sign of every value changes.
_COLUMNS = 63


class Fingerprint(NamedTuple):
    """Of values in memory; see `BucketStorage.fingerprint`."""

    sums: bytes
    version: int


def gradient_memory(
    buckets: Sequence[Bucket], trained: Sequence[Trained], reduce_dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Returns zeros for each bucket's gradients, of `reduce_dtype` (None: the parameters' own).

    On the processor all are parts of one array of `holmes_comm.empty`, which the ranks of a host reduce where it is.
    (The parameters are not in one: a forked child, which may write a checkpoint, would see them change.)
    """
    firsts = [trained[bucket.slots[0].parameter].tensor for bucket in buckets]
    dtypes = [reduce_dtype or first.dtype for first in firsts]
    sizes = [bucket.numel * dtype.itemsize for bucket, dtype in zip(buckets, dtypes, strict=True)]
    shared_sizes = [
        math.ceil(size / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES if first.device.type == "cpu" else 0
        for size, first in zip(sizes, firsts, strict=True)
    ]
    # With .data each has a version of its own, by which changes between backward and step are seen.
    parts = holmes_comm.empty(sum(shared_sizes), torch.uint8).split(shared_sizes)
    return [
        part[:size].view(dtype).data if len(part) else torch.zeros(bucket.numel, dtype=dtype, device=first.device)
        for part, size, dtype, bucket, first in zip(parts, sizes, dtypes, buckets, firsts, strict=True)
    ]


class BucketStorage:
    """Flat parameters and gradients of one bucket, and this rank's shard of both. Not thread-safe.

    Nothing is allocated after construction, so what is under way never takes more memory. `gradients`, zeros as
    `gradient_memory` gives them, may be of another dtype than the parameters: micro-batches accumulate and ranks reduce
    in it.

    Where `is_early`, shards step before the model may see that: the new values gather in `staging` (the memory of the
    gradients, which have been reduced by then, where they fit), and `gradient_shard` is memory of its own. Else
    `staging` is `values`, and `gradient_shard` a view of `gradients`.
    """

    def __init__(
        self,
        bucket: Bucket,
        trained: Sequence[Trained],
        rank: int,
        gradients: torch.Tensor,
        *,
        is_early: bool,
    ) -> None:
        first = trained[bucket.slots[0].parameter].tensor
        self.bucket = bucket
        self.is_early = is_early
        self.values = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
        bucket_addresses.add(self.values.data_ptr())
        self.gradients = gradients
        self._own = slice(rank * bucket.shard_numel, (rank + 1) * bucket.shard_numel)
        self.value_shard = self.values[self._own]
        self.gradient_shard = self.gradients[self._own].clone() if is_early else self.gradients[self._own]
        self.staging = self._staging() if is_early else self.values
        #: This rank's new values, once they have stepped.
        self.stepped: torch.Tensor = self.value_shard
        self.written: set[int] = set()  # parameters whose gradient of this step is in `gradients`
        self._trained = trained
        self._values: dict[int, torch.Tensor] = {}  # each parameter's part of `values`
        self._views: dict[int, torch.Tensor] = {}  # each parameter's part of `gradients`
        #: Address and strides of parameters, while they are views of `values`.
        self._places: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._attached: set[int] = set()  # parameters whose .grad is the view, or stands for it: autograd adds to it
        self._held: dict[int, HeldGradient] = {}  # what stands in .grad where the view is of another dtype
        self._sent: dict[int, SentGradient] = {}  # what stands in .grad once the bucket was sent
        self._spent: dict[int, SpentGradient] = {}  # and once the step was made
        for slot in bucket.slots:
            parameter, place = trained[slot.parameter].tensor, slice(slot.offset, slot.offset + slot.numel)
            self._values[slot.parameter] = self.values[place].view(parameter.shape)
            self._views[slot.parameter] = self.gradients[place].view(parameter.shape)
            self._bind(slot.parameter)

    # --- parameters ---

    def is_in_place(self) -> bool:
        """Whether no parameter's .data was replaced. Raises RuntimeError where it was by what does not fit (another
        dtype, shape or device)."""
        replaced = self._replaced()
        for index in replaced:
            self._check(index)
        return not replaced

    def adopt(self) -> bool:
        """Takes in what a parameter's .data was replaced with; in `step` only, as until then the old memory, which is
        overwritten, may be put back. Returns whether any was. Raises as `is_in_place`."""
        replaced = self._replaced()
        for index in replaced:
            self._bind(index)
        return bool(replaced)

    def _replaced(self) -> list[int]:
        return [i for i, place in self._places.items() if _place(self._trained[i].tensor) != place]

    def _check(self, index: int) -> None:
        name, parameter, view = self._trained[index].name, self._trained[index].tensor, self._values[index]
        for what in ("dtype", "shape", "device"):
            now, then = getattr(parameter, what), getattr(view, what)
            if now != then:
                raise RuntimeError(
                    f"parameter {name!r} has {what} {now} now, but {then} when its optimizer was made, which steps it "
                    "no longer; convert the model before making the optimizer, or close() this one and make a new one"
                )

    def _bind(self, index: int) -> None:
        self._check(index)
        parameter, view = self._trained[index].tensor, self._values[index]
        view.copy_(parameter.detach().clone())  # which may be the same memory, with other strides
        parameter.data = view
        self._places[index] = _place(parameter)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Those of the bucket."""
        return [self._trained[index].tensor for index in self._values]

    def place_stepped(self, target: torch.Tensor) -> torch.Tensor:
        """Writes this rank's new values into its part of `target` (`values` or `staging`) and returns that part."""
        own = target[self._own]
        if own.data_ptr() != self.stepped.data_ptr():
            own.copy_(self.stepped)
        return own

    def publish(self) -> None:
        """Everybody's new values are in `staging`: from now on they are the model's."""
        self.values.copy_(self.staging)

    def fingerprint(self) -> Fingerprint:
        """What changes with the parameters in this rank's shard, and with every change in place but through .data.

        The sums of the rows and of the columns of their bits: no two values can be exchanged without changing one.
        """
        bits = self.value_shard.view(torch.int64)
        rows = len(bits) // _COLUMNS
        table = bits[: rows * _COLUMNS].view(rows, _COLUMNS)
        sums = torch.cat([table.sum(0), table.sum(1), bits[rows * _COLUMNS :]])
        return Fingerprint(sums.numpy().tobytes(), sum(parameter._version for parameter in self.parameters()))

    def _staging(self) -> torch.Tensor:
        if self.gradients.itemsize < self.values.itemsize:
            return torch.zeros_like(self.values)
        return self.gradients.view(torch.uint8)[: self.values.nbytes].view(self.values.dtype)

    # --- gradients ---

    def take_gradient(self, index: int) -> None:
        """Brings what is in parameter `index`'s .grad into the bucket; later micro-batches add to it."""
        parameter, view = self._trained[index].tensor, self._views[index]
        gradient = parameter.grad
        if gradient is None:
            if index in self._attached:  # taken away since: it does not count
                self._attached.discard(index)
                self.written.discard(index)
            return
        if isinstance(gradient, HeldGradient | SpentGradient):
            return  # autograd has added to `view` already, or what it adds is not for a step
        if not _is_same_memory(gradient, view):
            view.copy_(dense(gradient))  # the first of this step, or one that already holds the earlier ones
        self.written.add(index)
        self._attached.add(index)
        if view.dtype == parameter.dtype:
            parameter.grad = view.view(view.shape)  # its own object: what is done to it leaves `view` in place
        else:
            if index not in self._held:
                self._held[index] = HeldGradient(parameter, self._trained[index].name, view)
            parameter.grad = self._held[index]

    def close(self) -> list[int]:
        """Makes `gradients` ready to be sent: takes what is left, zeroes what never came, and detaches every .grad.

        Returns the parameters without gradient.
        """
        missing = []
        for index, view in self._views.items():
            self.take_gradient(index)
            parameter = self._trained[index].tensor
            if index in self.written:
                if index not in self._sent:
                    self._sent[index] = SentGradient(parameter, self._trained[index].name)
                parameter.grad = self._sent[index]
            else:
                view.zero_()
                missing.append(index)
        self._attached.clear()
        return missing

    def disturbed(self) -> tuple[list[int], list[int]]:
        """Of a bucket that was sent: the parameters whose .grad was set to None since, and to something else."""
        cleared, replaced = [], []
        for index in self._views:
            gradient = self._trained[index].tensor.grad
            if gradient is None and index in self.written:
                cleared.append(index)
            elif gradient is not None and gradient is not self._sent.get(index):
                replaced.append(index)
        return cleared, replaced

    def release(self) -> None:
        """The last call: lets go of the gradients' memory. Drops what is in .grad, unless it is not of this storage:
        the zeros of zero_grad(set_to_none=False)."""
        for index in self._views:
            parameter = self._trained[index].tensor
            if index in self._attached or isinstance(parameter.grad, SentGradient):
                parameter.grad = None
        self._views.clear()
        self._held.clear()
        self.gradients = self.gradient_shard = self.gradients[:0].clone()
        self.staging = self.values

    def clear(self, *, is_stepped: bool = False) -> None:
        """Forgets this step's gradients; `is_stepped`: they stay in .grad, spent, until they are dropped."""
        with torch._C.DisableTorchFunctionSubclass():  # .grad of an awaited parameter takes 25 times as long else
            for index in self._views:
                parameter = self._trained[index].tensor
                if not is_stepped or parameter.grad is None:
                    parameter.grad = None
                    continue
                if index not in self._spent:
                    self._spent[index] = SpentGradient(parameter, self._trained[index].name)
                parameter.grad = self._spent[index]
        self.written.clear()
        self._attached.clear()


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.stride()


def _is_same_memory(gradient: torch.Tensor, view: torch.Tensor) -> bool:
    return (
        gradient.layout == torch.strided
        and gradient.dtype == view.dtype
        and gradient.data_ptr() == view.data_ptr()
        and gradient.stride() == view.stride()
    )
