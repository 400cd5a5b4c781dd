"""Small step: what stepping one bucket's shard costs, however little is in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from holmes.training.overlap.buckets import ParameterSize, lay_out
from holmes.training.overlap.parameters import Trained
from holmes.training.overlap.shards import ShardOptimizer, settings_of
from holmes.training.overlap.storage import BucketStorage


def small_step(
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    device: torch.device,
) -> Callable[[], None]:
    """Local. The step of a shard with one element, to be timed; arguments as of ShardOptimizer."""
    parameter = nn.Parameter(torch.zeros(1, device=device))
    (bucket,) = lay_out([0], [ParameterSize(1, parameter.element_size(), parameter.dtype)], 1, 1)
    trained = [Trained("one element", parameter, 0)]
    shard = ShardOptimizer(
        BucketStorage(bucket, trained, 0, None, is_early=False), 0, trained, optimizer_class, arguments, groups
    )
    settings = settings_of(groups)
    return lambda: shard.step(shard.gradients(1.0), frozenset(), settings)
