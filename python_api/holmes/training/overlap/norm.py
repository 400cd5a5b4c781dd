"""Norm: the global gradient norm over data, tensor and pipeline groups, of gradients that lie in shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from holmes_comm import kernels


def sum_of_squares(gradients: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Local. Scalar float64: each gradient's sum of squares times its weight; not finite where a gradient is not."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    is_of_one_kind = len({(gradient.device, gradient.dtype) for gradient in gradients}) == 1
    if is_of_one_kind and kernels.implementation(gradients[0]) == "CUDA kernels":
        total: torch.Tensor = kernels.squared_norm(gradients, weights)
        return total
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(list(gradients))])
    return (norms.square() * norms.new_tensor(list(weights))).sum()


def global_norm(local: torch.Tensor, groups: Iterable[dist.ProcessGroup | None]) -> float:
    """Collective over each group in turn. The root of the sum of `local` over all of them; equal on all their ranks."""
    total = local.reshape(1)
    for group in groups:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(total, group=group)
    return float(total.sqrt())


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What gradients are multiplied by so that their norm is at most `max_norm`, as torch's clip_grad_norm_ has it."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
