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

from holmes.training.overlap.agreement import LOCAL_SETTINGS, listed
from holmes.training.overlap.buckets import Fragment
from holmes.training.overlap.parameters import Trained
from holmes.training.overlap.shards import ShardOptimizer, blank_states

_KEEPING = (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
MASTER = "master"  # key of the float32 copy of a 16-bit parameter
IS_STEPPED = "is_stepped"  # key of 1; 0: the parameter had no gradient so far, and the other keys are placeholders


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
    """Local. The inverse. Raises ValueError where a part is missing or belongs to another layout or optimizer; nothing
    is changed then."""
    checked = []
    for shard, fragment, part, state in _each_state(shards):
        entry = trained[fragment.parameter]
        if entry.name not in saved:
            raise ValueError(f"the state of parameter {entry.name!r} is missing; it has {sorted(saved)[:5]} ...")
        loaded = dict(saved[entry.name])
        blank = {**state, IS_STEPPED: torch.tensor(0), **({MASTER: part} if shard.is_low_precision else {})}
        check_state(entry, loaded, blank)
        for key, value in loaded.items():
            if isinstance(value, FlatShard):
                if value.start != fragment.start or value.local.numel() != fragment.numel:
                    raise ValueError(
                        f"{key} of {entry.name!r} is elements [{value.start}, {value.start + value.local.numel()}), "
                        f"but this rank owns [{fragment.start}, {fragment.start + fragment.numel}): saved on another "
                        "layout; load it with torch.distributed.checkpoint, which brings every rank its part"
                    )
                loaded[key] = value.local.to(part.device, blank[key].dtype, copy=True)
            else:
                loaded[key] = number_like(blank[key], value)
        checked.append((shard, part, state, loaded))
    for shard, part, state, loaded in checked:
        if shard.is_low_precision:
            part.copy_(loaded.pop(MASTER))
        inner = shard.inner
        assert inner is not None
        if int(loaded.pop(IS_STEPPED)):
            state.update(loaded)
            inner.state[part] = state
        else:
            inner.state.pop(part, None)


def number_like(blank: Any, value: Any) -> Any:
    """A copy of what is not flat, as the optimizer that it was saved by goes on counting in it; a tensor where the
    optimizer that loads it has one (torch's counted in numbers once)."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return torch.as_tensor(value, dtype=blank.dtype) if isinstance(blank, torch.Tensor) else value


def check_state(entry: Trained, loaded: Mapping[str, Any], blank: Mapping[str, Any]) -> None:
    """Raises ValueError where `loaded` is not the state of `entry` that an optimizer keeps whose state is like `blank`,
    which has flat tensors for what a FlatShard is a part of."""
    if loaded.keys() != blank.keys():
        raise ValueError(
            f"the state of parameter {entry.name!r} has {sorted(loaded)}, this optimizer's {sorted(blank)}: load the "
            "state of an optimizer of the same class and options"
        )
    numel = entry.tensor.numel()
    for key, value in loaded.items():
        if isinstance(value, FlatShard):
            is_right = value.numel() == numel and 0 <= value.start <= numel - value.local.numel()
            what = f"elements from {value.start} of {value.numel()}"
        elif isinstance(blank[key], torch.Tensor):
            is_right = isinstance(value, torch.Tensor | int | float) and torch.as_tensor(value).numel() <= 1
            what = f"{type(value).__name__} of shape {tuple(getattr(value, 'shape', ()))}"
        else:
            is_right = isinstance(value, type(blank[key]))
            what = type(value).__name__
        if not is_right:
            raise ValueError(
                f"{key} of parameter {entry.name!r}, which has {numel} elements, cannot be {what}: load what "
                "state_dict() of an optimizer of the same model returned"
            )


def encode_settings(groups: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> str:
    """Hyperparameters of the groups and a few numbers, the same on every rank, as JSON. Raises ValueError where a group
    holds what that cannot say."""
    rows = [{k: listed(v) for k, v in g.items() if k != "params" and k not in LOCAL_SETTINGS} for g in groups]
    for number, row in enumerate(rows):
        for key, value in row.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise ValueError(
                    f"{key} of param_groups[{number}] is {groups[number][key]!r:.80}, of type "
                    f"{type(groups[number][key]).__name__}, which a checkpoint cannot hold: settings are numbers, "
                    "words and lists, tensors or arrays of these; keep the rest elsewhere"
                ) from None
    return json.dumps({"groups": rows, **extra})


def decode_settings(state_dict: Any, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `encode_settings` was given. Raises ValueError for what no state_dict of a DistributedOptimizer is, or has
    another number of groups."""
    if not isinstance(state_dict, Mapping) or not {"state", "settings"} <= state_dict.keys():
        has = f"has {sorted(map(str, state_dict))[:5]}" if isinstance(state_dict, Mapping) else f"is {state_dict!r:.80}"
        raise ValueError(
            "a DistributedOptimizer loads what its state_dict() returned, with 'state' and 'settings', or a plain "
            f"optimizer's, with 'state' and 'param_groups'; this {has}"
        )
    try:
        saved: dict[str, Any] = json.loads(state_dict["settings"])
        rows = saved["groups"]
        is_right = isinstance(saved["steps"], int) and "loss_scale" in saved and all(isinstance(r, dict) for r in rows)
    except (TypeError, ValueError, KeyError):
        is_right = False
    state = state_dict["state"]
    if not isinstance(state, Mapping) or not all(isinstance(entries, Mapping) for entries in state.values()):
        raise ValueError(
            f"'state' of the state to load is damaged: {state!r:.80}; it has a dict for each parameter, by name"
        )
    if not is_right:
        raise ValueError(
            f"'settings' of the state to load is damaged: {state_dict['settings']!r:.80}; it is the JSON text that "
            "state_dict() made"
        )
    if len(rows) != len(groups):
        raise ValueError(f"the checkpoint has {len(rows)} parameter groups, this optimizer {len(groups)}")
    return saved


def is_plain(state_dict: Any) -> bool:
    """Whether it is the state of an optimizer of torch's, such as one that DDP trained with."""
    return isinstance(state_dict, Mapping) and {"state", "param_groups"} <= state_dict.keys()


def from_plain(
    state_dict: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]], names: Sequence[Sequence[str | None]]
) -> dict[str, Any]:
    """Local. This rank's part of the state of a plain optimizer, as `state_dict` of DistributedOptimizer gives it.

    `own`: such a state of this rank, for its layout; `names`: of the parameters of each group, None for a frozen one,
    which the plain optimizer may have been given or not. Raises ValueError where the groups have other numbers of
    parameters.
    """
    groups = state_dict["param_groups"]
    sizes, given_sizes = [len(group["params"]) for group in groups], [len(group) for group in names]
    if sizes != given_sizes:
        names = [[name for name in group if name is not None] for group in names]
        own_sizes = [len(group) for group in names]
        if sizes != own_sizes:
            frozen = "" if own_sizes == given_sizes else f", or with its frozen ones of {given_sizes}"
            raise ValueError(f"the checkpoint has groups of {sizes} parameters, this optimizer of {own_sizes}{frozen}")
    number_of = {
        name: number
        for group, own_group in zip(groups, names, strict=True)
        for number, name in zip(group["params"], own_group, strict=True)
        if name is not None
    }
    state: dict[str, dict[str, Any]] = {}
    for name, entries in own.items():
        saved = state_dict["state"].get(number_of[name])
        kept = {key: value for key, value in entries.items() if key == MASTER}
        if saved is None:
            state[name] = {**entries, IS_STEPPED: torch.tensor(0)}
        else:
            parts = {key: _part_like(entries.get(key), value) for key, value in saved.items()}
            state[name] = {**parts, **kept, IS_STEPPED: torch.tensor(1)}
    settings = encode_settings(groups, {"steps": int(bool(state_dict["state"])), "loss_scale": None})
    return {"state": state, "settings": settings}


def _part_like(own: Any, whole: Any) -> Any:
    if not isinstance(own, FlatShard) or not isinstance(whole, torch.Tensor) or whole.numel() != own.numel():
        return whole
    part = whole.detach().reshape(-1)[own.start : own.start + own.local.numel()]
    return FlatShard(part.to(own.local), own.start, own.numel())


def as_loaded_by(
    optimizer_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The hyperparameters of saved groups as an optimizer of the class has them that loaded them: an AdamW stays one
    with those of an Adam."""
    template = optimizer_class([torch.nn.Parameter(torch.zeros(1))], **arguments)
    template.__setstate__({"state": {}, "param_groups": [{**row, "params": []} for row in rows]})
    return [{key: group[key] for key in row} for group, row in zip(template.param_groups, rows, strict=True)]


def check_settings(
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    saved: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Raises ValueError where the groups with these `rows` would step by state that was not loaded: what loads by keys,
    as torch.distributed.checkpoint, leaves out without a word what an optimizer does not ask for as it was made."""
    saver = saved.get("optimizer", optimizer_class.__name__)
    for number, (row, group) in enumerate(zip(rows, groups, strict=True)):
        own = {key: value for key, value in group.items() if key != "params"}
        missing = sorted(set(own) - set(row) - set(LOCAL_SETTINGS))
        if saver != optimizer_class.__name__ and missing:
            raise ValueError(
                f"the checkpoint is of {saver}, which has no {', '.join(missing)}; this optimizer is of "
                f"{optimizer_class.__name__}: load the state of an optimizer of the same class, or the model alone"
            )
        part = [torch.zeros(1)]
        asked, stepped = (
            set(blank_states(optimizer_class, arguments, [(dict(each), part)])[0]) for each in (own, {**own, **row})
        )
        if asked != stepped:
            different = [
                f"{key}={own[key]!r} here and {row[key]!r} there"
                for key in sorted(own.keys() & row.keys())
                if listed(own[key]) != listed(row[key])
            ]
            raise ValueError(
                f"with the checkpoint's settings param_groups[{number}] keeps {sorted(stepped)} for each parameter; it "
                f"was made with others and asked for {sorted(asked)} ({'; '.join(different)}): make the optimizer with "
                "the checkpoint's settings, load, and change them afterwards"
            )


def apply_settings(rows: Sequence[Mapping[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Sets the groups' hyperparameters, as saved."""
    for row, group in zip(rows, groups, strict=True):
        for key, value in row.items():
            group[key] = _setting_like(group.get(key), value)


def _setting_like(old: Any, value: Any) -> Any:
    if isinstance(old, torch.Tensor):
        old.copy_(torch.as_tensor(value))
        return old
    if isinstance(old, tuple) and isinstance(value, list | tuple):
        kept = old if len(old) == len(value) else (None,) * len(value)
        return tuple(_setting_like(*pair) for pair in zip(kept, value, strict=True))
    return value


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
