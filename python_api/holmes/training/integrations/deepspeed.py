"""A Plan as DeepSpeed's pipeline: process topology, layer boundaries and a PipelineModule that has both.

DeepSpeed's `partition_method` names rules ("uniform", "parameters", "type:..."), none of which takes given boundaries;
the PipelineModule made here takes the plan's instead of a rule's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from holmes.planning.plan.plan import Plan
from holmes.training.integrations.requirements import require_one, require_trainer
from holmes_comm.errors import UsageError

if TYPE_CHECKING:
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import ProcessTopology


def deepspeed_partition(plan: Plan, layers_before: int = 1, layers_after: int = 1) -> list[int]:
    """Boundaries of the stages in a PipelineModule's list of layers: stage i gets layers [b[i], b[i + 1]).

    `layers_before`, `layers_after`: entries of that list before the first and after the last transformer layer
    (embedding; norm, head), which go to the first and the last stage. Raises NotExpressible as `deepspeed_topology`.
    """
    _check(plan)
    counts = list(plan.layers_per_stage)
    counts[0] += layers_before
    counts[-1] += layers_after
    return [0, *accumulate(counts)]


def deepspeed_topology(plan: Plan) -> ProcessTopology:
    """DeepSpeed's grid of pipe, data and model (tensor) parallel ranks, with the plan's ranks in it. Local.

    Raises NotExpressible for what DeepSpeed's pipeline has not: interleaving, context and expert parallelism, another
    schedule than 1F1B.
    """
    _check(plan)
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=plan.pipeline, num_mp=plan.tensor, num_dp=plan.data)
    # Its constructor numbers ranks in the grid's order; the plan may have them in another.
    topology.mapping = {place: plan.order[index] for place, index in topology.mapping.items()}
    return topology


def deepspeed_pipeline_module(
    plan: Plan, layers: Sequence[Any], layers_before: int = 1, layers_after: int = 1, **options: Any
) -> PipelineModule:
    """A `deepspeed.pipe.PipelineModule` with the plan's grid and stages. Collective over all ranks.

    `layers`, `options`: as PipelineModule's, without `topology`, `num_stages` and `partition_method`. Raises
    ValueError where the number of layers is not the plan's, and NotExpressible as `deepspeed_topology`.
    """
    boundaries = deepspeed_partition(plan, layers_before, layers_after)
    if len(layers) != boundaries[-1]:
        raise UsageError(
            f"the pipeline has {len(layers)} layers, but the plan's {sum(plan.layers_per_stage)} with "
            f"layers_before={layers_before} and layers_after={layers_after} make {boundaries[-1]}"
        )
    from deepspeed.pipe import PipelineModule

    from holmes.training.integrations.nics import planned_nics

    class PlannedPipeline(PipelineModule):  # type: ignore[misc]  # DeepSpeed has no types
        def _partition_layers(self, method: str = "uniform") -> None:
            self.parts = boundaries
            stage = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(start=boundaries[stage], stop=boundaries[stage + 1])

    with planned_nics(plan):
        return PlannedPipeline(layers, topology=deepspeed_topology(plan), **options)


def _check(plan: Plan) -> None:
    require_trainer(plan, "deepspeed")
    require_one(plan, "DeepSpeed's pipeline", "chunks", "is not interleaved")
    require_one(plan, "DeepSpeed's pipeline", "context", "has no context parallelism")
    require_one(plan, "DeepSpeed's pipeline", "expert", "has no expert parallelism")
