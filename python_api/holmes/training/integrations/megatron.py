"""Megatron-core's groups from a Plan: its parallel_state, its ProcessGroupCollection, each group on its planned NICs.

Megatron numbers ranks in its own order ("tp-cp-ep-dp-pp") and makes the groups itself. Here its own
`initialize_model_parallel` runs; only its rank numbers are translated into the plan's, and its groups made for them. So
everything that it keeps beside the groups (rank lists, embedding ranks, buffers) is right as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from holmes.planning.groups.rank_grid import KINDS
from holmes.planning.plan.plan import Plan
from holmes.training.integrations.nics import new_group, planned_nics
from holmes_comm.errors import JobError, UsageError

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch.distributed import ProcessGroup
from holmes.training.integrations.requirements import require_trainer

ORDER = "tp-cp-ep-dp-pp"
# Fields of ProcessGroupCollection that with one optimizer instance, which is all a plan has, are another one's ranks.
_SAME_RANKS = {"intra_dp_cp": "dp_cp", "intra_expt_dp": "expt_dp"}


@contextmanager
def megatron_groups(plan: Plan) -> Iterator[None]:
    """While it is open, Megatron's `initialize_model_parallel` with the plan's sizes makes the plan's groups.

    For training scripts that call it themselves (Megatron-LM's): open it, on every rank, around their main function;
    `megatron_arguments` has the sizes. Groups that Megatron asks of Gloo, for tensors in host memory, are made by
    Holmes too where the job's backend for them is "holmes": Gloo chooses one interface for all groups.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    order = [int(rank) for rank in plan.order]

    class PlannedRanks(parallel_state.RankGenerator):  # type: ignore[misc]  # Megatron has no types
        """Megatron's rank numbers are places in the plan's order."""

        def get_ranks(self, token: str) -> list[list[int]]:
            return [[order[place] for place in places] for places in super().get_ranks(token)]

    def create_group(ranks: list[int] | None = None, **options: Any) -> ProcessGroup | None:
        if options.get("backend") == "gloo" and _host_backend() == "holmes":
            options.update(backend="holmes", pg_options=None)
        group = new_group(ranks, **options)
        if ranks is None or dist.get_rank() in ranks:  # what update_pg_timeout goes through; None is the default group
            parallel_state._global_process_group_list = [*(parallel_state._global_process_group_list or [None]), group]
        return group

    originals = parallel_state.RankGenerator, parallel_state.create_group
    parallel_state.RankGenerator, parallel_state.create_group = PlannedRanks, create_group
    try:
        with planned_nics(plan):
            yield
    finally:
        parallel_state.RankGenerator, parallel_state.create_group = originals


def initialize_megatron(plan: Plan, **options: Any) -> ProcessGroupCollection:
    """Sets Megatron's parallel_state to the plan's groups and returns them. Collective over all ranks.

    `options`: further arguments of `initialize_model_parallel`. Raises ValueError where the plan is for another number
    of ranks or an option contradicts it, RuntimeError where this Megatron release makes other groups than the plan.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    arguments = _sizes(plan)
    if wrong := sorted(set(options) & set(arguments)):
        raise UsageError(f"{', '.join(wrong)} of initialize_model_parallel come from the plan; leave them out")
    if options.get("num_distributed_optimizer_instances", 1) != 1:
        raise UsageError(
            f"num_distributed_optimizer_instances={options['num_distributed_optimizer_instances']}, but a plan has no "
            "groups for several optimizer instances; use 1"
        )
    with megatron_groups(plan):
        parallel_state.initialize_model_parallel(**arguments, **options)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    _check_groups(plan, collection)
    return collection


def megatron_process_groups(plan: Plan, backend: str = "holmes") -> ProcessGroupCollection:
    """The plan's groups as a ProcessGroupCollection, without Megatron's global parallel_state. Collective.

    For models and optimizers that take `pg_collection`. Fields that only several optimizer instances or hierarchical
    context parallelism use are None, and so are the embedding groups on ranks that are not in one.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    from holmes.training.process_groups import process_groups

    kinds = [kind for kind in KINDS if kind in ProcessGroupCollection.__dataclass_fields__]
    groups = process_groups(plan, backend, [*kinds, "world"])
    fields = {kind: groups.get(kind) for kind in kinds} | {field: groups[kind] for field, kind in _SAME_RANKS.items()}
    return ProcessGroupCollection(**fields, hcp=None, inter_dist_opt=None, intra_dist_opt=groups["world"])


def _sizes(plan: Plan) -> dict[str, Any]:
    """The plan's part of `initialize_model_parallel`'s arguments."""
    return {
        "tensor_model_parallel_size": plan.tensor,
        "pipeline_model_parallel_size": plan.pipeline,
        "virtual_pipeline_model_parallel_size": plan.chunks if plan.chunks > 1 else None,
        "context_parallel_size": plan.context,
        "expert_model_parallel_size": plan.expert,
        "expert_tensor_parallel_size": plan.expert_tensor,
        "order": ORDER,
    }


def _check_groups(plan: Plan, collection: ProcessGroupCollection) -> None:
    """Another release of Megatron may order ranks otherwise: that must not go unseen."""
    import torch.distributed as dist

    for group in plan.groups_of(dist.get_rank()):
        made = getattr(collection, group.kind, None)
        ranks = None if made is None else tuple(dist.get_process_group_ranks(made))
        if ranks is not None and ranks != group.ranks:
            raise JobError(
                f"this Megatron-core made {group.kind!r} group {list(ranks)}, but the plan has {list(group.ranks)}; "
                "use a release that numbers ranks by its argument order (0.16.1 does)"
            )


def _host_backend() -> str | None:
    """The default group's backend for tensors in host memory."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import BackendConfig

    return BackendConfig(dist.Backend(dist.get_backend_config())).get_device_backend_map().get("cpu")


def megatron_layout(plan: Plan) -> str:
    """Which layers each virtual stage builds: "Et*3|t*4|t*3L": E the embedding, t a transformer layer, L the loss.

    Virtual stages stand in the model's order, as Megatron reads them: chunk 0 of every stage, then chunk 1.
    """
    return "E" + "|".join(f"t*{count}" if count > 1 else "t" * count for count in plan.layers_per_part) + "L"


def megatron_arguments(plan: Plan) -> list[str]:
    """Arguments for Megatron-LM's training scripts: sizes, layers, their layout; batch sizes where the plan has them.

    Raises NotExpressible for a schedule that Megatron does not have.
    """
    require_trainer(plan, "megatron")
    sizes: dict[str, int | str | None] = {
        "tensor-model-parallel-size": plan.tensor,
        "pipeline-model-parallel-size": plan.pipeline,
        "context-parallel-size": plan.context,
        "expert-model-parallel-size": plan.expert,
        "expert-tensor-parallel-size": plan.expert_tensor if plan.expert_tensor != plan.tensor else None,
        "num-layers": sum(plan.layers_per_stage),
        "pipeline-model-parallel-layout": megatron_layout(plan) if plan.pipeline > 1 else None,
        "microbatch-group-size-per-virtual-pipeline-stage": plan.micro_batch_group,
        "micro-batch-size": plan.micro_batch,
        "global-batch-size": plan.global_batch,
    }
    sized = [word for name, value in sizes.items() if value is not None for word in (f"--{name}", str(value))]
    return [
        *sized,
        *(
            word
            for name, value in assumed(plan).items()
            for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
        ),
    ]


def assumed(plan: Plan) -> dict[str, str | bool]:
    """Megatron's options for what the search's memory and times count on; none where the plan does not say.

    The optimizer is sharded over data-parallel ranks with its traffic overlapped, activations outside a tensor group's
    matrices are split over it, and what is computed a second time is as planned.
    """
    if plan.recomputation is None:
        return {}
    options: dict[str, str | bool] = dict.fromkeys(
        ("use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather"), True
    )
    if plan.tensor > 1:
        options["sequence-parallel"] = True
    if plan.recomputation != "none":
        options["recompute-granularity"] = plan.recomputation
    if plan.recomputation == "full":
        options |= {"recompute-method": "uniform", "recompute-num-layers": "1"}
    return options
