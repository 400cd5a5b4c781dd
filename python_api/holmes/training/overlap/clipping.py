"""Clipping: a step that needs the norm of all gradients, or whether one overflowed, before any shard steps; and that
norm, over data, tensor and pipeline groups, of gradients that lie in shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from holmes.training.overlap.loss_scale import LossScale
from holmes.training.overlap.parameters import Trained
from holmes.training.overlap.runtime import Runtime
from holmes.training.overlap.transfers import Lane
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


class ClippedStep:
    """Steps all shards with gradients clipped by their global norm, and skips the step where one is not finite.

    Arguments as of DistributedOptimizer; `lane` is of the data-parallel group. Not thread-safe.
    """

    def __init__(
        self,
        lane: Lane,
        trained: Sequence[Trained],
        max_grad_norm: float | None,
        norm_groups: Sequence[dist.ProcessGroup],
        is_replicated: Callable[[str, nn.Parameter], bool] | None,
        loss_scale: LossScale | None,
    ) -> None:
        self._lane = lane
        self._max_grad_norm = max_grad_norm
        self._loss_scale = loss_scale
        self._groups = [*([lane.group] if lane.size > 1 else []), *norm_groups]
        copies = dist.get_world_size(norm_groups[0]) if norm_groups else 1
        self._weights = [
            1.0 / copies if is_replicated is not None and is_replicated(t.name, t.tensor) else 1.0 for t in trained
        ]

    def step(self, runtime: Runtime, number: int) -> float:
        """Collective, after all reduce-scatters have started. Returns the norm before clipping, unscaled.

        Raises FloatingPointError, on all ranks and with no parameter changed, where it is not finite and there is no
        loss scaling; `number` is the step's, for that message.
        """
        for transfer in runtime.reducer.transfers:
            transfer.wait()
        divisor = self._lane.divisor * (self._loss_scale.value if self._loss_scale else 1.0)
        raw = [shard.gradients(1.0) for shard in runtime.shards]
        flat = [gradient for gradients in raw for gradient in gradients]
        weights = [self._weights[fragment.parameter] for shard in runtime.shards for fragment in shard.fragments]
        norm = global_norm(sum_of_squares(flat, weights), self._groups) / divisor
        found_inf = not math.isfinite(norm)
        if found_inf and self._loss_scale is None:
            raise FloatingPointError(
                f"the gradient norm of step {number} is {norm}; no parameter was changed. Find the cause, or give "
                'loss_scale="dynamic" to skip such steps'
            )
        if not found_inf:
            factor = clip_factor(norm, self._max_grad_norm) / divisor
            if factor != 1.0 and flat:
                torch._foreach_mul_(flat, factor)
            runtime.step_all(raw)
        if self._loss_scale is not None:
            self._loss_scale.update(found_inf=found_inf)
        return norm
