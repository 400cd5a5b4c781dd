"""1F1B and ZB-H1 with a plan's own number of forwards first, and interleaved with its own groups of micro-batches, as a
schedule of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from holmes.planning.simulate.schedules import operations
from holmes.training.pipeline.steps import Steps

_Runtime: Any = _PipelineScheduleRuntime  # whose methods are untyped


class WarmedSchedule(Steps, _Runtime):  # type: ignore[misc]
    """The order that the simulator runs, with the sends and receives that torch's runtime puts into it.

    `warmup`, `group`: as of a plan. Raises ValueError where the pipeline has another number of stages.
    """

    def __init__(
        self,
        stages: list[Any],
        micro_batches: int,
        schedule: str,
        warmup: Sequence[int] | None,
        group: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(stages, micro_batches, **options)
        count, chunks = self.pp_group_size, len(stages)
        kind = _ComputationType
        backward = kind.BACKWARD_INPUT if schedule == "zb-h1" else kind.FULL_BACKWARD
        phases = {"F": kind.FORWARD, "B": backward, "W": kind.BACKWARD_WEIGHT}
        self.pipeline_order = {
            rank: [
                _Action(operation.chunk * count + rank, phases[operation.phase], operation.micro_batch)
                for operation in operations(schedule, count, rank, micro_batches, chunks, warmup, group)
            ]
            for rank in range(count)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
