"""Pending: state loaded before the first step, when the buckets' order is not known yet.

Until then every rank holds an equal part of each parameter's state; the first step brings it to the shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holmes.training.overlap.checkpoint import IS_STEPPED, MASTER
from holmes.training.overlap.flat_shard import FlatShard
from holmes.training.overlap.parameters import Trained
from holmes.training.overlap.shards import ShardOptimizer, blank_states, is_low_precision
from holmes.training.overlap.transfers import Lane


class PendingState:
    """For every parameter the part [start, end) of its flattened state that this rank keeps. Not thread-safe."""

    def __init__(
        self,
        lane: Lane,
        trained: Sequence[Trained],
        optimizer_class: type[torch.optim.Optimizer],
        arguments: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        self.is_loaded = False
        self._lane, self._trained = lane, trained
        self._states: list[dict[str, Any]] = []
        self._starts: list[int] = []
        for entry in trained:
            flat = entry.tensor.detach().reshape(-1)
            length = -(-flat.numel() // lane.size)
            part = flat[lane.rank * length :][:length]
            part = part.float() if is_low_precision(part) else part
            settings = {key: value for key, value in groups[entry.group].items() if key != "params"}
            (state,) = blank_states(optimizer_class, arguments, [({**settings}, [part])])
            state[IS_STEPPED] = torch.tensor(0)
            if is_low_precision(flat):
                state[MASTER] = part.clone()
            self._states.append(state)
            self._starts.append(min(lane.rank * length, flat.numel()))

    def state(self) -> dict[str, dict[str, Any]]:
        """Local. As checkpoint.state_tensors."""
        return {
            entry.name: {
                key: FlatShard(value, start, entry.tensor.numel()) if _is_flat(value) else value
                for key, value in state.items()
            }
            for entry, start, state in zip(self._trained, self._starts, self._states, strict=True)
            if start < entry.tensor.numel()
        }

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Local. The inverse. Raises ValueError where a part is missing or belongs to another layout."""
        for entry, start, state in zip(self._trained, self._starts, self._states, strict=True):
            if start == entry.tensor.numel():
                continue
            if entry.name not in saved:
                raise ValueError(f"the state of parameter {entry.name!r} is missing; it has {sorted(saved)[:5]} ...")
            for key, value in saved[entry.name].items():
                given = value.local if isinstance(value, FlatShard) else value
                if isinstance(value, FlatShard) and (value.start, given.shape) != (start, state[key].shape):
                    raise ValueError(
                        f"{key} of {entry.name!r} begins at element {value.start} with {given.numel()} elements, "
                        f"here at {start} with {state[key].numel()}: saved on another layout; load it with "
                        "torch.distributed.checkpoint, which brings every rank its part"
                    )
                state[key] = given.clone() if isinstance(given, torch.Tensor) else given
        self.is_loaded = True

    def distribute(self, shards: Sequence[ShardOptimizer]) -> None:
        """Collective. Gives every shard what it owns, one parameter's state at a time."""
        owned = {
            fragment.parameter: (shard, fragment, part)
            for shard in shards
            for fragment, part in zip(shard.fragments, shard.parts, strict=True)
        }
        for index, (entry, state) in enumerate(zip(self._trained, self._states, strict=True)):
            numel = entry.tensor.numel()
            if numel == 0:
                continue
            whole = {key: self._gather(value, numel) for key, value in state.items()}
            if index not in owned:
                continue
            shard, fragment, part = owned[index]
            mine = {
                key: value[fragment.start : fragment.start + fragment.numel].clone() if _is_flat(value) else value
                for key, value in whole.items()
            }
            if MASTER in mine:
                part.copy_(mine.pop(MASTER))
            assert shard.inner is not None
            if int(mine.pop(IS_STEPPED)):
                shard.inner.state[part] = mine

    def _gather(self, value: Any, numel: int) -> Any:
        """The whole of a flat tensor; of anything else the first rank's."""
        if self._lane.size == 1:
            return value
        if isinstance(value, int | float):
            return type(value)(self._lane.broadcast(torch.tensor(value)).item())
        if not isinstance(value, torch.Tensor):
            return value
        if not _is_flat(value):
            return self._lane.broadcast(value.clone())
        length = -(-numel // self._lane.size)
        padded = torch.nn.functional.pad(value, (0, length - value.numel()))
        whole = padded.new_empty(length * self._lane.size)
        self._lane.all_gather(-1, whole, padded).wait()
        return whole[:numel]


def _is_flat(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1
