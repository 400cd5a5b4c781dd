"""Agreement: what must be equal on all ranks of a group that train together."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from holmes.training.overlap.parameters import Trained
from holmes.training.overlap.transfers import Lane
from holmes.training.overlap.usage import agree

_CHUNK_BYTES = 32 << 20
LOCAL_SETTINGS = ("fused", "foreach", "capturable", "differentiable")  # say how a machine steps, not what the step is


def check_equal_models(lane: Lane, trained: Sequence[Trained], weight: float = 1.0) -> None:
    """Collective. Raises ValueError on all ranks where their trained parameters differ in name, shape or dtype, and
    where what each rank's gradients count (`weight`) does not make a mean."""
    text = "\n".join(f"{t.name} {tuple(t.tensor.shape)} {t.tensor.dtype} {t.group}" for t in trained)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    device = trained[0].tensor.device
    ((greatest,), (least,), (is_uneven,)) = agree(lane.group, [[digest], [-digest], [int(weight != 1.0)]], device)
    if greatest != -least:
        raise ValueError(
            f"the ranks of group {lane.label!r} do not train the same parameters (rank {lane.rank}: {len(trained)}, "
            f"from {trained[0].name!r} to {trained[-1].name!r}); names, shapes, dtypes and groups must be equal"
        )
    if is_uneven:
        _check_weights(lane, weight, device)


def _check_weights(lane: Lane, weight: float, device: torch.device) -> None:
    total = torch.tensor([weight], dtype=torch.float64, device=device)
    if lane.size > 1:
        dist.all_reduce(total, group=lane.group)
    if not math.isclose(total.item(), lane.size, rel_tol=1e-6):
        raise ValueError(
            f"gradient_weight is {weight:g} on rank {lane.rank} of group {lane.label!r} and {total.item():g} on all "
            f"its {lane.size} ranks together, which must be {lane.size} for a mean; give samples * ranks / all samples "
            "on each of them, as plan.gradient_weight(rank) is"
        )


def listed(value: Any) -> Any:
    """A setting in Python's own numbers and lists, where it is torch's or numpy's; others stay as they are."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    return [listed(each) for each in value] if isinstance(value, tuple | list) else value


def compared_settings(groups: Sequence[Mapping[str, Any]], names: Collection[str]) -> list[dict[str, Any]]:
    """Local. Of each group the settings called one of `names` that are numbers, words or rows of these."""

    def is_plain(value: Any) -> bool:
        return all(map(is_plain, value)) if isinstance(value, list) else isinstance(value, bool | int | float | str)

    compared = sorted(set(names) - set(LOCAL_SETTINGS))
    rows = [{name: listed(group[name]) for name in compared if name in group} for group in groups]
    return [{name: value for name, value in row.items() if value is None or is_plain(value)} for row in rows]


def settings_word(settings: Sequence[Mapping[str, Any]], steps: int) -> int:
    """31 bits that differ where these do, by more than what two machines' arithmetic may."""

    def rounded(value: Any) -> Any:
        if isinstance(value, list):
            return [rounded(each) for each in value]
        return f"{value:.6g}" if isinstance(value, float) else value

    text = repr([steps, *({name: rounded(value) for name, value in group.items()} for group in settings)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def steps_difference(steps: Sequence[int]) -> str:
    """Local. What to say where the ranks' states, after `steps` each, cannot go on together; empty where they can."""
    rank = next((rank for rank, count in enumerate(steps) if count != steps[0]), None)
    if rank is None:
        return ""
    return (
        f"the state of rank 0 of this group is after {steps[0]} steps, that of rank {rank} after {steps[rank]}: parts "
        "of one parameter would be of different trainings. No parameter was changed; load on every rank what was "
        "saved after the same step"
    )


def settings_difference(lane: Lane, settings: Sequence[Mapping[str, Any]], steps: int) -> str:
    """Collective, where some rank's word is not that of the others. What to say of a setting that differs, or of the
    steps so far; empty where none does but in its last digits."""
    found: list[Any] = [None] * lane.size
    dist.all_gather_object(found, (settings, steps), group=lane.group)
    rows = [row for row, _ in found]
    if difference := steps_difference([count for _, count in found]):
        return difference
    for rank, row in enumerate(rows):
        for number, (group, other) in enumerate(zip(rows[0], row, strict=True)):
            for name in sorted(group.keys() | other.keys()):
                if not _are_close(group.get(name), other.get(name)):
                    return (
                        f"{name} of param_groups[{number}] is {group.get(name)} on rank 0 of this group and "
                        f"{other.get(name)} on rank {rank}: each would step its part of every parameter with its own. "
                        "No parameter was changed; set it alike on all ranks (a scheduler that looks at a loss, such "
                        "as ReduceLROnPlateau, needs the mean over the ranks: all_reduce it first)"
                    )
    return ""


def _are_close(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def broadcast_model(lane: Lane, modules: Sequence[nn.Module]) -> None:
    """Collective. Parameters and buffers become those of the group's first rank."""
    if lane.size == 1:
        return
    tensors = {id(t): t.detach() for m in modules for t in (*m.parameters(), *m.buffers())}
    chunks: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors.values():
        chunk = chunks.setdefault((tensor.dtype, tensor.device), [])
        chunk.append(tensor)
        if sum(t.numel() * t.itemsize for t in chunk) >= _CHUNK_BYTES:
            _broadcast(lane, chunks.pop((tensor.dtype, tensor.device)))
    for chunk in chunks.values():
        _broadcast(lane, chunk)


def _broadcast(lane: Lane, tensors: Sequence[torch.Tensor]) -> None:
    flat = lane.broadcast(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
