"""Plan -> this rank's pipeline stages, with a wire dtype where a boundary crosses clusters, and torch's
schedule of the plan's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
from torch import nn
from torch.distributed.pipelining import PipelineStage as TorchPipelineStage

from holmes.planning.plan.plan import Plan
from holmes.planning.schedule import SCHEDULES, check_schedule, fits_rounds
from holmes.training.arguments import whole
from holmes.training.pipeline.checked import checked
from holmes.training.pipeline.stage import PipelineStage
from holmes.training.pipeline.steps import Steps
from holmes.training.pipeline.warmed import WarmedSchedule
from holmes_comm.errors import UsageError

#: torch's class for each schedule that a plan can name.
CLASSES = dict(
    zip(
        SCHEDULES,
        ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"),
        strict=True,
    )
)
_ONE_STAGE = ("gpipe", "1f1b")  # their classes take one stage, the others a list


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


def pipeline_schedule(
    plan: Plan,
    stages: Sequence[TorchPipelineStage],
    loss_fn: Callable[..., torch.Tensor],
    *,
    micro_batches: int | None = None,
    **options: Any,
) -> Any:
    """torch's schedule for the plan's: an object whose `step` runs all micro-batches through these stages. Local.

    `stages`: this rank's, one for each chunk, as `pipeline_stages` makes them. `micro_batches`: of a step through this
    rank's replica; None: the plan's. The gradients are those of the mean over the replica's batch of `loss_fn(output,
    target)`, itself a mean over samples: each micro-batch counts by its part of the target's samples (what a replica
    counts beside others, DistributedOptimizer knows). The loss is divided, not the gradients afterwards, so that
    DistributedOptimizer may send them while others are still computed. What `step` puts into `losses` are the undivided
    ones. `options` go to torch's schedule.

    Beyond torch's: a plan's `warmup` and `micro_batch_group` (`WarmedSchedule`, a schedule in torch's form); a batch
    may have another size in each step, and need not be divisible by `micro_batches` (`Steps`); `eval` needs no target;
    gradients are right where torch's zero-bubble schedule loses some (docs/upstream.md), also with torch's own stages.

    Raises ValueError where the number of stages is not the plan's, or of micro-batches is not known, below 1, or none
    that the schedule runs.
    """
    check_schedule(plan.schedule, len(stages))
    if len(stages) != plan.chunks:
        raise UsageError(f"stages has {len(stages)} entries, but the plan gives each rank {plan.chunks} (its chunks)")
    if micro_batches is not None:
        micro_batches = whole("micro_batches", micro_batches, "; None takes the plan's")
    count = micro_batches
    if count is None:  # a plan without shares may be of a part of the job, whose ranks have other numbers in it
        count = plan.micro_batches_of(dist.get_rank()) if plan.has_uneven_shares else plan.micro_batches
    if count is None:
        raise UsageError(
            "micro_batches=None needs a plan with micro_batch and global_batch, but this one has "
            f"micro_batch={plan.micro_batch}, global_batch={plan.global_batch}; give micro_batches"
        )
    if plan.schedule not in _ONE_STAGE and not fits_rounds("zb-h1", plan.pipeline, count):  # both have rounds in torch
        near = [each for each in range(1, 2 * count) if fits_rounds("zb-h1", plan.pipeline, each)]
        below, above = max(each for each in near if each < count), min(each for each in near if each > count)
        raise UsageError(
            f"micro_batches={count} cannot be had with schedule={plan.schedule!r} and pipeline={plan.pipeline}: its "
            f"{count // plan.pipeline} whole rounds of all stages must divide them; the nearest are {below} and {above}"
        )

    own = [checked(stage) for stage in stages]
    if plan.warmup is not None or plan.micro_batch_group is not None:
        order = (plan.schedule, plan.warmup, plan.micro_batch_group)
        return WarmedSchedule(own, count, *order, loss_fn=loss_fn, **options)
    cls = getattr(torch_pipelining, CLASSES[plan.schedule])
    taken = own[0] if plan.schedule in _ONE_STAGE else own
    return type(cls.__name__, (Steps, cls), {})(taken, count, loss_fn=loss_fn, **options)
