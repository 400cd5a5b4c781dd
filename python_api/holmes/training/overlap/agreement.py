"""Agreement: what must be equal on all ranks of a group before they train together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn

from holmes.training.overlap.parameters import Trained
from holmes.training.overlap.transfers import Lane
from holmes.training.overlap.usage import agree

_CHUNK_BYTES = 32 << 20


def check_equal_models(lane: Lane, trained: Sequence[Trained]) -> None:
    """Collective. Raises ValueError on all ranks where their trained parameters differ in name, shape or dtype."""
    text = "\n".join(f"{t.name} {tuple(t.tensor.shape)} {t.tensor.dtype} {t.group}" for t in trained)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    ((greatest,), (least,)) = agree(lane.group, [[digest], [-digest]], trained[0].tensor.device)
    if greatest != -least:
        raise ValueError(
            f"the ranks of group {lane.label!r} do not train the same parameters (rank {lane.rank}: {len(trained)}, "
            f"from {trained[0].name!r} to {trained[-1].name!r}); names, shapes, dtypes and groups must be equal"
        )


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
