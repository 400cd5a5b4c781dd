"""A Plan as Megatron-LM's command line, with the `--pipeline-model-parallel-layout` string. Needs no Megatron."""

from __future__ import annotations

from holmes.planning.plan.plan import Plan
from holmes.training.integrations.requirements import require_schedule


def megatron_layout(plan: Plan) -> str:
    """Which layers each virtual stage builds: "Et*3|t*4|t*3L": E the embedding, t a transformer layer, L the loss.

    Virtual stages stand in the model's order, as Megatron reads them: chunk 0 of every stage, then chunk 1.
    """
    return "E" + "|".join(f"t*{count}" if count > 1 else "t" * count for count in plan.layers_per_part) + "L"


def megatron_arguments(plan: Plan) -> list[str]:
    """Arguments for Megatron-LM's training scripts: sizes, layers, their layout; batch sizes where the plan has them.

    Raises NotExpressible for a schedule that Megatron does not have.
    """
    require_schedule(plan, "Megatron", ("1f1b", "interleaved"))
    sizes: dict[str, int | str | None] = {
        "tensor-model-parallel-size": plan.tensor,
        "pipeline-model-parallel-size": plan.pipeline,
        "context-parallel-size": plan.context,
        "expert-model-parallel-size": plan.expert,
        "expert-tensor-parallel-size": plan.expert_tensor if plan.expert_tensor != plan.tensor else None,
        "num-layers": sum(plan.layers_per_stage),
        "pipeline-model-parallel-layout": megatron_layout(plan) if plan.pipeline > 1 else None,
        "micro-batch-size": plan.micro_batch,
        "global-batch-size": plan.global_batch,
    }
    return [word for name, value in sizes.items() if value is not None for word in (f"--{name}", str(value))]
