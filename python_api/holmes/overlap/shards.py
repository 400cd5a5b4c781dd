"""Shards: torch's own optimizer on the part of a bucket that this rank owns."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from holmes.overlap.parameters import Trained
from holmes.overlap.storage import BucketStorage

#: Their update of one element depends on others, which may be another rank's.
NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
_LOW_PRECISION = (torch.float16, torch.bfloat16)


class ShardOptimizer:
    """Steps this rank's shard of one bucket. Not thread-safe.

    16-bit parameters have a float32 master copy here, which is what steps; others step in place. Each fragment (part of
    one parameter) is a tensor of the inner optimizer, so parameter groups and missing gradients work as in torch.
    """

    def __init__(
        self,
        storage: BucketStorage,
        rank: int,
        trained: Sequence[Trained],
        optimizer_class: type[torch.optim.Optimizer],
        arguments: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        self.fragments = storage.bucket.fragments(rank)
        self.is_low_precision = is_low_precision(storage.values)
        self.master = storage.value_shard.float() if self.is_low_precision else storage.value_shard
        self.parts = [self.master[f.offset : f.offset + f.numel] for f in self.fragments]
        self._storage = storage
        self._outer = groups
        self._arguments = arguments
        members: dict[int, list[torch.Tensor]] = {}
        for fragment, part in zip(self.fragments, self.parts, strict=True):
            members.setdefault(trained[fragment.parameter].group, []).append(part)
        self._group_numbers = list(members)
        self.inner: torch.optim.Optimizer | None = None
        if members:
            inner_groups = [{**_settings(groups[g]), "params": parts} for g, parts in members.items()]
            self.inner = optimizer_class(inner_groups, **arguments)

    def gradients(self, divisor: float) -> list[torch.Tensor]:
        """This rank's reduced gradients over `divisor`, one per fragment, in the dtype that steps."""
        shard = self._storage.gradient_shard
        if divisor != 1.0:
            shard.div_(divisor)
        shard = shard.to(self.master.dtype)
        return [shard[f.offset : f.offset + f.numel] for f in self.fragments]

    def step(self, gradients: Sequence[torch.Tensor], unused: Collection[int]) -> None:
        """One step with `gradients` (see above); parameters in `unused` stay as they are."""
        if self.inner is None:
            return
        for number, inner_group in zip(self._group_numbers, self.inner.param_groups, strict=True):
            inner_group.update(_settings(self._outer[number]))
        for fragment, part, gradient in zip(self.fragments, self.parts, gradients, strict=True):
            part.grad = None if fragment.parameter in unused else gradient
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)
        if self.is_low_precision:
            self._storage.value_shard.copy_(self.master)

    def blank_state(self, part: torch.Tensor) -> dict[str, Any]:
        """The state of one of `parts` before its first step (see `blank_states`)."""
        assert self.inner is not None
        group = next(g for g in self.inner.param_groups if any(part is member for member in g["params"]))
        (state,) = blank_states(type(self.inner), self._arguments, [(_settings(group), [part])])
        return state

    def refresh_master(self) -> None:
        """Follows parameters that were changed from outside; where they still are the master's, that keeps its bits."""
        if self.is_low_precision:
            shard = self._storage.value_shard
            self.master.copy_(torch.where(self.master.to(shard.dtype) == shard, self.master, shard.float()))


def blank_states(
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    groups: Sequence[tuple[Mapping[str, Any], Sequence[torch.Tensor]]],
) -> list[dict[str, Any]]:
    """For each tensor of `groups` (settings, tensors) the state that the optimizer makes in its first step, as it is
    before that step.

    Made by a step of zeros on zeros; a counter that the step moved is moved back.
    """
    zeros = [torch.zeros_like(tensor) for _, tensors in groups for tensor in tensors]
    given = iter(zeros)
    throwaway = optimizer_class([{**s, "params": [next(given) for _ in tensors]} for s, tensors in groups], **arguments)
    for zero in zeros:
        zero.grad = torch.zeros_like(zero)
    throwaway.step()
    states = [dict(throwaway.state[zero]) for zero in zeros]
    for state in states:
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()
    return states


def is_low_precision(tensor: torch.Tensor) -> bool:
    """Whether the tensor steps through a float32 master copy."""
    return tensor.dtype in _LOW_PRECISION


def with_fused(
    optimizer_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any], tensors: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """`arguments` with fused=True where the class has it, the devices do and nothing else was asked for.

    Raises ValueError for an optimizer that needs whole parameters.
    """
    if optimizer_class.__name__ in NOT_ELEMENTWISE:
        raise ValueError(
            f"{optimizer_class.__name__} needs whole parameters (or sparse gradients), but each rank steps a shard; "
            "use an element-wise one such as AdamW, Adam or SGD"
        )
    chosen = dict(arguments)
    accepted = inspect.signature(optimizer_class).parameters
    if (
        "fused" in accepted
        and not {"fused", "foreach", "differentiable", "capturable"} & chosen.keys()
        and {tensor.device.type for tensor in tensors} <= {"cpu", "cuda"}
    ):
        chosen["fused"] = True
    return chosen


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
