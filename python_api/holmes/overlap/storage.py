"""Storage: the memory of one bucket. The model's parameters become views of it; gradients gather in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from holmes.overlap.buckets import Bucket


class BucketStorage:
    """Flat parameters and gradients of one bucket, and this rank's shard of both (views). Not thread-safe.

    Nothing is allocated after construction, so what is under way never takes more memory. `gradients` is of
    `reduce_dtype` (None: the parameters' own): micro-batches accumulate and ranks reduce in it.
    """

    def __init__(
        self, bucket: Bucket, parameters: Sequence[nn.Parameter], rank: int, reduce_dtype: torch.dtype | None
    ) -> None:
        first = parameters[bucket.slots[0].parameter]
        self.bucket = bucket
        self.values = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(bucket.numel, dtype=reduce_dtype or first.dtype, device=first.device)
        own = slice(rank * bucket.shard_numel, (rank + 1) * bucket.shard_numel)
        self.value_shard, self.gradient_shard = self.values[own], self.gradients[own]
        self.written: set[int] = set()  # parameters whose gradient of this step is in `gradients`
        self._parameters = parameters
        self._views: dict[int, torch.Tensor] = {}
        self._attached: set[int] = set()  # parameters whose .grad is the view, into which autograd accumulates
        for slot in bucket.slots:
            parameter, place = parameters[slot.parameter], slice(slot.offset, slot.offset + slot.numel)
            view = self.values[place].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            self._views[slot.parameter] = self.gradients[place].view(parameter.shape)

    def take_gradient(self, index: int) -> None:
        """Brings what is in parameter `index`'s .grad into the bucket; later micro-batches add to it."""
        parameter, view = self._parameters[index], self._views[index]
        gradient = parameter.grad
        if gradient is None:
            return
        if gradient.data_ptr() != view.data_ptr() or gradient.dtype != view.dtype:
            dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            if index in self.written and index not in self._attached:
                view.add_(dense)
            else:  # the first of this step, or one that already holds the earlier ones
                view.copy_(dense)
        self.written.add(index)
        if view.dtype == parameter.dtype:
            parameter.grad = view
            self._attached.add(index)
        else:
            parameter.grad = None

    def close(self) -> list[int]:
        """Makes `gradients` ready to be sent: takes what is left, zeroes what never came, and detaches every .grad.

        Returns the parameters without gradient.
        """
        missing = []
        for index, view in self._views.items():
            self.take_gradient(index)
            if index not in self.written:
                view.zero_()
                missing.append(index)
            self._parameters[index].grad = None
        self._attached.clear()
        return missing

    def clear(self) -> None:
        """Forgets this step's gradients."""
        for index in self._views:
            self._parameters[index].grad = None
        self.written.clear()
        self._attached.clear()
