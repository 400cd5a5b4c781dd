"""Shards: torch's own optimizer on the part of a bucket that this rank owns."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from holmes.training.overlap.parameters import Trained
from holmes.training.overlap.storage import BucketStorage

_LOW_PRECISION = (torch.float16, torch.bfloat16)

#: Hyperparameters of each parameter group, without its parameters.
Settings = Sequence[Mapping[str, Any]]


class ShardOptimizer:
    """Steps this rank's shard of one bucket. Not thread-safe.

    16-bit parameters have a float32 master copy here, which is what steps. Others step in place, or, where the storage
    is early, in a copy too. What was changed in the parameters from outside is taken over before each step. Each
    fragment (part of one parameter) is a tensor of the inner optimizer, so parameter groups and missing gradients work
    as in torch.
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
        self.master = storage.value_shard
        if self.is_low_precision:
            self.master = storage.value_shard.float()
        elif storage.is_early:
            self.master = storage.value_shard.clone()
        storage.stepped = self.master
        self.parts = [self.master[f.offset : f.offset + f.numel] for f in self.fragments]
        self._storage = storage
        self._arguments = arguments
        self._undo = _Undo(self)
        members: dict[int, list[torch.Tensor]] = {}
        for fragment, part in zip(self.fragments, self.parts, strict=True):
            members.setdefault(trained[fragment.parameter].group, []).append(part)
        self._group_numbers = list(members)
        self.inner: torch.optim.Optimizer | None = None
        if members:
            settings = settings_of(groups)
            inner_groups = [{**settings[g], "params": parts} for g, parts in members.items()]
            self.inner = optimizer_class(inner_groups, **arguments)

    def gradients(self, divisor: float, *, are_kept: bool = False) -> list[torch.Tensor]:
        """This rank's reduced gradients over `divisor`, one per fragment, in the dtype that steps.

        `are_kept`: a step that changes them in place, as some that are not fused do, changes copies.
        """
        shard = self._storage.gradient_shard
        if divisor != 1.0:
            shard = shard / divisor
        is_fused = self.inner is not None and all(group.get("fused") for group in self.inner.param_groups)
        shard = shard.to(self.master.dtype, copy=are_kept and divisor == 1.0 and not is_fused)
        return [shard[f.offset : f.offset + f.numel] for f in self.fragments]

    def step(
        self,
        gradients: Sequence[torch.Tensor],
        unused: Collection[int],
        settings: Settings,
        *,
        can_undo: bool = False,
    ) -> None:
        """One step with `gradients` (see above); parameters in `unused` stay as they are."""
        if self.inner is None:
            return
        self._follow_parameters()
        if can_undo:
            self._undo.keep()
        for number, inner_group in zip(self._group_numbers, self.inner.param_groups, strict=True):
            inner_group.update(settings[number])
        for fragment, part, gradient in zip(self.fragments, self.parts, gradients, strict=True):
            part.grad = None if fragment.parameter in unused else gradient
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)

    def undo(self) -> None:
        """Takes back a step that was made with `can_undo`."""
        if self.inner is not None:
            self._undo.restore()

    def forget_state(self) -> None:
        """The shard is as before its first step."""
        if self.inner is not None:
            self.inner.state.clear()
        if self.is_low_precision:
            self.master.copy_(self._storage.value_shard)

    def blank_state(self, part: torch.Tensor) -> dict[str, Any]:
        """The state of one of `parts` before its first step (see `blank_states`)."""
        assert self.inner is not None
        group = next(g for g in self.inner.param_groups if any(part is member for member in g["params"]))
        settings = {key: value for key, value in group.items() if key != "params"}
        (state,) = blank_states(type(self.inner), self._arguments, [(settings, [part])])
        return state

    def _follow_parameters(self) -> None:
        """Takes over the parameters' values; where 16-bit ones still are the master's, that keeps its bits."""
        shard = self._storage.value_shard
        if self.is_low_precision:
            is_kept = self.master.to(shard.dtype) == shard
            if not bool(is_kept.all()):
                self.master.copy_(torch.where(is_kept, self.master, shard.float()))
        elif self.master is not shard:
            self.master.copy_(shard)


class _Undo:
    """What a step changes, as it was before it. The memory is kept from step to step."""

    def __init__(self, shard: ShardOptimizer) -> None:
        self._shard = shard
        self._master: torch.Tensor | None = None  # of 16-bit parameters; others' is in the model's own
        self._states: list[dict[str, Any] | None] = [None] * len(shard.parts)

    def keep(self) -> None:
        """The shard is about to step."""
        shard, targets, sources = self._shard, [], []
        assert shard.inner is not None
        if shard.is_low_precision:
            if self._master is None:
                self._master = torch.empty_like(shard.master)
            targets, sources = [self._master], [shard.master]
        for number, part in enumerate(shard.parts):
            state = shard.inner.state.get(part)
            kept = self._states[number]
            if not state:
                self._states[number] = None
                continue
            if kept is None or kept.keys() != state.keys():
                kept = self._states[number] = {key: _room_for(value) for key, value in state.items()}
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    targets.append(kept[key])
                    sources.append(value)
                else:
                    kept[key] = value
        if targets:
            torch._foreach_copy_(targets, sources)

    def restore(self) -> None:
        """The state is as it was when `keep` was called; a full-precision master follows the model with the next step.

        In place where it can be, as others may hold the tensors.
        """
        shard = self._shard
        assert shard.inner is not None
        if self._master is not None:
            shard.master.copy_(self._master)
        for part, kept in zip(shard.parts, self._states, strict=True):
            if kept is None:
                shard.inner.state.pop(part, None)
                continue
            state = shard.inner.state[part]
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and isinstance(state.get(key), torch.Tensor):
                    state[key].copy_(value)
                else:
                    state[key] = value
            for key in state.keys() - kept.keys():
                del state[key]


def _room_for(value: Any) -> Any:
    return torch.empty_like(value) if isinstance(value, torch.Tensor) else value


def settings_of(groups: Sequence[Mapping[str, Any]]) -> Settings:
    """What the groups say now, copied, so that it stays."""
    return [{k: _copied(v) for k, v in group.items() if k != "params"} for group in groups]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def are_equal_settings(some: Settings, others: Settings) -> bool:
    """Whether a step with either gives the same."""

    def are_equal(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
            return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
        same = one == other
        return same if isinstance(same, bool) else bool(np.all(same))

    return all(
        one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
        for one, other in zip(some, others, strict=True)
    )


def blank_states(
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    groups: Sequence[tuple[Mapping[str, Any], Sequence[torch.Tensor]]],
) -> list[dict[str, Any]]:
    """For each tensor of `groups` (settings, tensors) the state that the optimizer makes in its first step: what keys
    and shapes a checkpoint has. What is in it does not count (see checkpoint.IS_STEPPED).

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

    Not for SGD, whose fused step fails where some parameters have a momentum buffer and others, which had no gradient
    so far, do not (torch 2.13).
    """
    chosen = dict(arguments)
    accepted = inspect.signature(optimizer_class).parameters
    if (
        "fused" in accepted
        and not issubclass(optimizer_class, torch.optim.SGD)
        and not {"fused", "foreach", "differentiable", "capturable"} & chosen.keys()
        and {tensor.device.type for tensor in tensors} <= {"cpu", "cuda"}
    ):
        chosen["fused"] = True
    return chosen
