"""Element-wise: whether an optimizer's update of an element depends on nothing but that element. It is tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_SHAPE, _CUT = (6, 5), 13  # a parameter, and where it is cut into two shards
_STEPS = 3
#: Of GPUs only, where the trial runs on the host; they change how a step is made, not what it gives.
_HOW = ("capturable", "fused", "foreach")


def check_elementwise(optimizer_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> None:
    """Local, milliseconds. Steps a small parameter whole, and cut into two shards, on the host.

    Raises ValueError where that gives different numbers, where the class cannot step a shard at all, or where it keeps
    state in its param_groups, which shards do not share.
    """
    name = optimizer_class.__name__
    known = {key: value for key, value in arguments.items() if key not in _HOW}
    generator = torch.Generator().manual_seed(7)
    start = torch.randn(_SHAPE, generator=generator)
    gradients = [torch.randn(_SHAPE, generator=generator) for _ in range(_STEPS)]
    whole = [start.clone()]
    shards = _cut(start.clone())
    try:
        settings_change = _train(optimizer_class, known, whole, [[gradient] for gradient in gradients])
        _train(optimizer_class, known, shards, [_cut(gradient) for gradient in gradients])
    except Exception as error:
        raise ValueError(
            f"{name} needs whole parameters (or sparse gradients, or a closure), but each rank steps a flat shard of "
            f"them; tried on one, it says: {error}. Use an element-wise one such as AdamW, Adam or SGD"
        ) from error
    if not torch.allclose(torch.cat(shards), whole[0].flatten(), rtol=1e-4, atol=1e-6):
        raise ValueError(
            f"{name} needs whole parameters: tried on a parameter and on two shards of it, it gives different numbers, "
            "but each rank steps a shard; use an element-wise one such as AdamW, Adam or SGD"
        )
    if settings_change:
        raise ValueError(
            f"{name} keeps state in its param_groups ({', '.join(settings_change)} changed in a step), which ranks "
            "that step shards do not share; use one whose state is in optimizer.state, such as AdamW, Adam or SGD"
        )


def _cut(whole: torch.Tensor) -> list[torch.Tensor]:
    flat = whole.flatten()
    return [flat[:_CUT], flat[_CUT:]]


def _train(
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    tensors: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
) -> list[str]:
    """Steps `tensors` with each of `gradients`. Returns the settings that this changed."""
    copied: dict[str, Any]
    copied = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
    optimizer = optimizer_class(list(tensors), **copied)
    (group,) = optimizer.param_groups
    before = {key: str(value) for key, value in group.items() if key != "params"}
    for step in gradients:
        for tensor, gradient in zip(tensors, step, strict=True):
            tensor.grad = gradient.clone()
        optimizer.step()
    return [key for key, value in group.items() if key != "params" and str(value) != before.get(key)]
