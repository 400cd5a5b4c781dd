"""A Plan as torchtitan's ParallelismConfig. Its meshes follow from the sizes, their NICs from `planned_nics`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holmes.planning.plan.plan import Plan
from holmes.planning.schedule import TRAINERS
from holmes.training.integrations.requirements import NotExpressible, require_order, require_trainer

_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}


def torchtitan_module_fqns(
    plan: Plan,
    embedding: Sequence[str] = ("tok_embeddings",),
    layer: str = "layers.{}",
    head: Sequence[str] = ("norm", "lm_head"),
) -> list[list[str]]:
    """Module names of every virtual stage, in the model's order: `module_fqns_per_model_part`.

    The names are those of torchtitan's decoders; `layer` is formatted with the layer's index. Raises NotExpressible
    for a stage without any module, for which torchtitan has no optimizer.
    """
    counts = plan.layers_per_part
    parts: list[list[str]] = []
    first = 0
    for count in counts:
        parts.append([layer.format(index) for index in range(first, first + count)])
        first += count
    parts[0][:0] = embedding
    parts[-1].extend(head)
    if [] in parts:
        raise NotExpressible(
            f"virtual stage {parts.index([])} of {len(parts)} has no layer (layers of each: {list(counts)}), but "
            "torchtitan needs a parameter in each; plan again with fewer stages or chunks"
        )
    return parts


def torchtitan_parallelism(plan: Plan, **names: Any) -> dict[str, Any]:
    """Keyword arguments of torchtitan's `ParallelismConfig`; `names` go to `torchtitan_module_fqns`.

    Raises NotExpressible for ranks that are not numbered in the plan's order (torchtitan's mesh is), a schedule that
    torch does not have or has too few micro-batches for, and tensor parallelism inside experts.
    """
    require_order(plan, "torchtitan")
    require_trainer(plan, "torchtitan")
    if plan.expert > 1 and plan.expert_tensor > 1:
        raise NotExpressible(
            f"the plan has expert_tensor={plan.expert_tensor}, but torchtitan does not split an expert's tensors; "
            "plan again with expert_tensor=1"
        )
    config: dict[str, Any] = {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": plan.data,
        "tensor_parallel_degree": plan.tensor,
        "context_parallel_degree": plan.context,
        "expert_parallel_degree": plan.expert,
        "pipeline_parallel_degree": plan.pipeline,
    }
    if plan.pipeline > 1:
        if plan.micro_batches is not None and not TRAINERS["torchtitan"].runs(
            plan.schedule, plan.pipeline, plan.micro_batches
        ):
            raise NotExpressible(
                f"the plan has {plan.micro_batches} micro-batches and pipeline={plan.pipeline}, but torchtitan's 1F1B "
                "needs as many as stages at least; plan again with one of these: holmes plan --for torchtitan"
            )
        config["pipeline_parallel_schedule"] = _SCHEDULES[plan.schedule]
        config["module_fqns_per_model_part"] = torchtitan_module_fqns(plan, **names)
        if plan.micro_batch is not None:
            config["pipeline_parallel_microbatch_size"] = plan.micro_batch
    return config


def torchtitan_arguments(plan: Plan, **names: Any) -> list[str]:
    """The last arguments of `torchtitan.train` (0.3.0): what the plan assumes, each word of its own.

    They must stand last: recomputation is a subcommand of its command line. Raises as `torchtitan_parallelism`.
    """
    sections: dict[str, dict[str, Any]] = {"parallelism": torchtitan_parallelism(plan, **names)}
    if plan.micro_batch is not None and plan.global_batch is not None:
        # A pipeline's micro-batches are parts of the local batch; without one, each is accumulated.
        local = plan.global_batch // plan.data if plan.pipeline > 1 else plan.micro_batch
        sections["training"] = {"local_batch_size": local, "global_batch_size": plan.global_batch}
    words: list[str] = []
    for section, options in sections.items():
        for name, value in options.items():
            words += [f"--{section}.{name}", *_values(value)]
    return words if plan.recomputation is None else [*words, f"activation-checkpoint:{plan.recomputation}"]


def _values(value: Any) -> list[str]:
    """Of a list of lists each one is a word with commas."""
    return [",".join(part) for part in value] if isinstance(value, list) else [str(value)]
