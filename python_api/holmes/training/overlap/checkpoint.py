"""Checkpoint: the optimizer's state by parameter name, each rank its part of the flattened tensors
(FlatShard), as torch.distributed.checkpoint saves and loads it on any layout."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from holmes.training.overlap.buckets import Fragment
from holmes.training.overlap.parameters import Trained
from holmes.training.overlap.shards import ShardOptimizer

_KEEPING = (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
MASTER = "master"  # key of the float32 copy of a 16-bit parameter
IS_STEPPED = "is_stepped"  # key of 1; 0: the parameter had no gradient so far, and the other keys are placeholders
_LOCAL_SETTINGS = ("fused", "foreach", "capturable", "differentiable")  # say how a machine steps, not what the step is


class FlatShard(torch.Tensor):
    """Elements [start, start + len(local)) of a tensor of `numel` elements, flattened; other ranks have the rest.

    Its shape is the whole tensor's, (numel,). For checkpoints only: it can be detached, cloned, moved and pickled.
    """

    local: torch.Tensor
    start: int

    @staticmethod
    def __new__(cls, local: torch.Tensor, start: int, numel: int) -> FlatShard:
        """`local`: this rank's part, 1-D; its memory is shared."""
        made = torch.Tensor._make_wrapper_subclass(cls, (numel,), dtype=local.dtype, device=local.device)
        made.local, made.start = local, start
        return made

    def __init__(self, local: torch.Tensor, start: int, numel: int) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        """Where it lies and what is in it."""
        return f"FlatShard({self.local}, start={self.start}, numel={self.numel()})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles this rank's part."""
        return FlatShard, (self.local.clone(), self.start, self.numel())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copies keep their place; nothing else is defined."""
        if func in _KEEPING:
            shard: FlatShard = args[0]
            return cls(func(shard.local, *args[1:], **(kwargs or {})), shard.start, shard.numel())
        raise NotImplementedError(f"{func} is not defined for a FlatShard; use its .local")

    def __create_write_items__(self, fqn: str, _value: Any) -> list[WriteItem]:
        """What this rank writes (torch's protocol of checkpointable objects)."""
        data = TensorWriteData(
            chunk=self._chunk(), properties=TensorProperties.create_from_tensor(self.local), size=self.size()
        )
        return [WriteItem(MetadataIndex(fqn, self._chunk().offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What this rank reads."""
        return [self._chunk()]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> torch.Tensor:
        """The memory to write from or read into."""
        return self.local

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size([self.start]), sizes=self.local.size())


torch.serialization.add_safe_globals([FlatShard])  # torch.load of a state_dict, with its default weights_only=True


class StateElsewhere(defaultdict[Any, Any]):
    """What stands for optimizer.state, which each rank's shards have. Walking through it finds nothing (some trainers
    do that to move it to a device); to look something up, to count or to write is a RuntimeError."""

    @staticmethod
    def error(what: str) -> RuntimeError:
        """`what` was done to it."""
        return RuntimeError(
            f"optimizer.state was {what}, but each rank's part of the state is elsewhere; use state_dict() and "
            "load_state_dict() (torch.distributed.checkpoint saves and loads what state_dict() returns; its "
            "get_state_dict does not know it), or make a new optimizer to begin with a fresh state"
        )

    def _read(self, *_: Any) -> NoReturn:
        raise self.error("read")

    def _written(self, *_: Any, **__: Any) -> NoReturn:
        raise self.error("written to")

    __len__ = __contains__ = __getitem__ = __missing__ = get = _read
    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = _written


def state_tensors(shards: Sequence[ShardOptimizer], trained: Sequence[Trained]) -> dict[str, dict[str, Any]]:
    """Local. name -> key -> this rank's part (FlatShard, sharing memory), or what has another size as it is.

    Keys are the inner optimizer's own, MASTER and IS_STEPPED.
    """
    found: dict[str, dict[str, Any]] = {}
    for shard, fragment, part, state in _each_state(shards):
        size = trained[fragment.parameter].tensor.numel()
        assert shard.inner is not None
        is_stepped = torch.tensor(int(bool(shard.inner.state.get(part))))
        entries = {**state, IS_STEPPED: is_stepped, **({MASTER: part} if shard.is_low_precision else {})}
        found[trained[fragment.parameter].name] = {
            key: FlatShard(value, fragment.start, size) if _is_flat(value, part) else value
            for key, value in entries.items()
        }
    return found


def load_state_tensors(
    shards: Sequence[ShardOptimizer], trained: Sequence[Trained], saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Local. The inverse. Raises ValueError where a part is missing or belongs to another layout."""
    for shard, fragment, part, state in _each_state(shards):
        name = trained[fragment.parameter].name
        if name not in saved:
            raise ValueError(f"the state of parameter {name!r} is missing; it has {sorted(saved)[:5]} ...")
        loaded = dict(saved[name])
        for key, value in loaded.items():
            if isinstance(value, FlatShard):
                if value.start != fragment.start or value.local.numel() != fragment.numel:
                    raise ValueError(
                        f"{key} of {name!r} is elements [{value.start}, {value.start + value.local.numel()}), but this "
                        f"rank owns [{fragment.start}, {fragment.start + fragment.numel}): saved on another layout; "
                        "load it with torch.distributed.checkpoint, which brings every rank its part"
                    )
                loaded[key] = value.local.to(part.device).clone()
        if shard.is_low_precision:
            part.copy_(loaded.pop(MASTER))
        inner = shard.inner
        assert inner is not None
        if int(loaded.pop(IS_STEPPED, 1)):
            state.update(loaded)
            inner.state[part] = state
        else:
            inner.state.pop(part, None)


def encode_settings(groups: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> str:
    """Hyperparameters of the groups and a few numbers, the same on every rank, as JSON."""
    rows = [{k: _plain(v) for k, v in g.items() if k != "params" and k not in _LOCAL_SETTINGS} for g in groups]
    return json.dumps({"groups": rows, **extra})


def decode_settings(text: str, groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sets the groups' hyperparameters; returns the rest. Raises ValueError where the number of groups differs."""
    saved: dict[str, Any] = json.loads(text)
    rows = saved.pop("groups")
    if len(rows) != len(groups):
        raise ValueError(f"the checkpoint has {len(rows)} parameter groups, this optimizer {len(groups)}")
    for row, group in zip(rows, groups, strict=True):
        for key, value in row.items():
            old = group.get(key)
            if isinstance(old, torch.Tensor):
                old.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(old, tuple) else value
    return saved


def _each_state(
    shards: Sequence[ShardOptimizer],
) -> Iterator[tuple[ShardOptimizer, Fragment, torch.Tensor, dict[str, Any]]]:
    for shard in shards:
        for fragment, part in zip(shard.fragments, shard.parts, strict=True):
            assert shard.inner is not None
            state = shard.inner.state.get(part) or shard.blank_state(part)
            yield shard, fragment, part, state


def _is_flat(value: Any, part: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == part.shape


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
