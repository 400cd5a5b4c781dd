"""Pending: state loaded before the first step, when the buckets' order is not known yet.

Until then every rank holds an equal part of each parameter's state; the first step brings it to the shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from holmes.training.overlap.agreement import steps_difference
from holmes.training.overlap.checkpoint import IS_STEPPED, MASTER, FlatShard, check_state, number_like
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
        self._lengths: list[int] = []
        self._device = trained[0].tensor.device
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
            self._lengths.append(part.numel())

    def state(self) -> dict[str, dict[str, Any]]:
        """Local. As checkpoint.state_tensors."""
        return {
            entry.name: {
                key: FlatShard(value, start, entry.tensor.numel()) if _is_flat(value) else value
                for key, value in state.items()
            }
            for entry, start, length, state in zip(
                self._trained, self._starts, self._lengths, self._states, strict=True
            )
            if length
        }

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Local. What this rank saved, on any layout; together the ranks must bring every element.

        Raises ValueError where it is the state of other parameters or of another optimizer; nothing is changed then.
        """
        if saved and not any(entry.name in saved for entry in self._trained):
            names = [entry.name for entry in self._trained]
            raise ValueError(
                f"the state is of the parameters {sorted(saved)[:5]} ..., this optimizer has {names[:5]} ..."
            )
        for entry, state in zip(self._trained, self._states, strict=True):
            if entry.name in saved:
                check_state(entry, saved[entry.name], state)
        for index, (entry, state) in enumerate(zip(self._trained, self._states, strict=True)):
            loaded = saved.get(entry.name)
            if loaded is None:  # another rank has it
                self._states[index] = {key: value[:0] if _is_flat(value) else value for key, value in state.items()}
                self._starts[index] = self._lengths[index] = 0
                continue
            shards = [value for value in loaded.values() if isinstance(value, FlatShard)]
            self._starts[index] = shards[0].start if shards else 0
            self._lengths[index] = shards[0].local.numel() if shards else entry.tensor.numel()
            for key, value in loaded.items():
                is_flat = isinstance(value, FlatShard)
                blank = state[key]
                state[key] = value.local.to(blank.dtype, copy=True) if is_flat else number_like(blank, value)
        self.is_loaded = True

    def distribute(self, shards: Sequence[ShardOptimizer], steps: int) -> None:
        """Collective. Gives every shard what it owns, one parameter's state at a time. steps: after how many it was
        saved.

        Raises ValueError on every rank where elements of a parameter's state are missing, or saved after other steps.
        """
        if difference := steps_difference(self._all_gather(torch.tensor([steps])).tolist()):
            raise ValueError(difference)
        owned = {
            fragment.parameter: (shard, fragment, part)
            for shard in shards
            for fragment, part in zip(shard.fragments, shard.parts, strict=True)
        }
        for index, (pieces, state) in enumerate(zip(self._pieces(), self._states, strict=True)):
            if not pieces:
                continue
            whole = {key: self._gather(state[key], pieces) for key in sorted(state)}
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

    def _pieces(self) -> list[list[_Piece]]:
        """Of each parameter who has which elements, in their order; parameters without elements have none."""
        own = torch.tensor(list(zip(self._starts, self._lengths, strict=True)), dtype=torch.int64)
        table = self._all_gather(own.reshape(-1)).reshape(self._lane.size, -1, 2).tolist()
        found = []
        for index, entry in enumerate(self._trained):
            parts = enumerate(ranks[index] for ranks in table)
            pieces = sorted(_Piece(start, length, rank) for rank, (start, length) in parts if length)
            end = 0
            for piece in pieces:
                if piece.start != end:
                    break
                end += piece.length
            is_numbers = not any(map(_is_flat, self._states[index].values()))  # the same on all that have them
            if end != entry.tensor.numel() and not (is_numbers and pieces):
                raise ValueError(
                    f"the loaded state of parameter {entry.name!r} lacks element {end} of {entry.tensor.numel()}, or "
                    "ranks loaded the same elements: load on every rank what that rank saved, on the same number of "
                    "ranks, or use torch.distributed.checkpoint, which serves any number"
                )
            found.append(pieces)
        return found

    def _gather(self, value: Any, pieces: Sequence[_Piece]) -> Any:
        """The whole of a flat tensor; of anything else that of the rank with the first elements."""
        if self._lane.size == 1:
            return value
        first = pieces[0].rank
        if isinstance(value, bool | int | float):
            dtype = torch.float64 if isinstance(value, float) else torch.int64
            return type(value)(self._all_gather(torch.tensor([value], dtype=dtype))[first].item())
        if not isinstance(value, torch.Tensor):
            return value
        if not _is_flat(value):
            return self._all_gather(value.reshape(-1)).reshape(self._lane.size, *value.shape)[first]
        length = max(piece.length for piece in pieces)
        rows = self._all_gather(torch.nn.functional.pad(value, (0, length - value.numel()))).reshape(-1, length)
        return torch.cat([rows[piece.rank][: piece.length] for piece in pieces])

    def _all_gather(self, value: torch.Tensor) -> torch.Tensor:
        """Every rank's `value`, one after the other, where it lies; over the device that the group serves."""
        if self._lane.size == 1:
            return value
        sent = value.to(self._device)
        whole = sent.new_empty(value.numel() * self._lane.size)
        self._lane.all_gather(-1, whole, sent.contiguous()).wait()
        return whole.to(value.device)


class _Piece(NamedTuple):
    """Elements [start, start + length) of a parameter's state, which `rank` has."""

    start: int
    length: int
    rank: int


def _is_flat(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1
