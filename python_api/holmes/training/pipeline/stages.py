"""Plan -> this rank's pipeline stages, with a wire dtype where a boundary crosses clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holmes.planning.plan.plan import Plan
from holmes.training.pipeline.stage import PipelineStage
from holmes_comm.errors import UsageError


def pipeline_stages(
    plan: Plan,
    modules: Sequence[nn.Module],
    *,
    group: dist.ProcessGroup,
    device: torch.device | str = "cpu",
    wire_dtype: torch.dtype | None = None,
    **options: Any,
) -> list[PipelineStage]:
    """One stage for each of this rank's modules: `modules[chunk]` holds `plan.layers_of(stage, chunk)`. Local.

    `group`: this rank's pipeline group in the plan's order, `process_groups(plan).pp`. `wire_dtype`: of values and
    gradients where a boundary joins ranks of two clusters (torch.bfloat16 halves float32's bytes there); inside a
    cluster they stay as they are. `options` go to `PipelineStage`.

    Raises ValueError where there is not one module for each chunk.
    """
    if len(modules) != plan.chunks:
        raise UsageError(f"modules has {len(modules)} entries, but the plan gives each rank {plan.chunks} (its chunks)")
    ranks = dist.get_process_group_ranks(group)
    own = dist.get_rank(group)
    cluster_of = {rank: cluster.name for cluster in plan.clusters for rank in cluster.ranks}
    clusters = [cluster_of[rank] for rank in ranks]
    count = plan.pipeline * plan.chunks

    def wire(stage: int) -> torch.dtype | None:
        """Of the boundary before stage number `stage` of the whole pipeline."""
        before, behind = clusters[(stage - 1) % plan.pipeline], clusters[stage % plan.pipeline]
        return wire_dtype if before != behind else None

    return [
        PipelineStage(
            module,
            index,
            count,
            device,
            group=group,
            input_wire_dtype=wire(index),
            output_wire_dtype=wire(index + 1),
            **options,
        )
        for index, module in ((chunk * plan.pipeline + own, module) for chunk, module in enumerate(modules))
    ]
