"""DeepSpeed's pipeline engine: the plan's stages across the clusters, data parallel inside them (ZeRO-1).

    holmes testbed run -- python -W ignore examples/deepspeed_pipeline.py

`deepspeed_pipeline_module` puts DeepSpeed's grid and stage boundaries where the plan has them.
"""

import common
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec

import holmes
from holmes.lab.demo.model import Block
from holmes.training.integrations import deepspeed_pipeline_module, planned_nics

MICRO_BATCHES = 2


class Embedding(torch.nn.Module):
    """Token and position embedding."""

    def __init__(self, vocabulary: int, width: int, sequence: int) -> None:
        super().__init__()
        self.token = torch.nn.Embedding(vocabulary, width)
        self.position = torch.nn.Parameter(torch.randn(sequence, width) * 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Activations, [batch, sequence, width]."""
        return self.token(tokens) + self.position


def main() -> None:
    """Trains with the plan's groups."""
    arguments, settings = common.arguments(), common.Settings()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for minutes, for inference only
    dist.init_process_group(arguments.backend)
    deepspeed.init_distributed(dist_backend=arguments.backend, dist_init_required=False)
    plan = holmes.make_plan(model_layers=settings.layers, pipeline=2)
    batches = common.Batches(settings)
    replica = plan.group_of("dp", dist.get_rank()).ranks.index(dist.get_rank())
    micro_batch = settings.share(plan.data * MICRO_BATCHES, "data-parallel ranks * micro-batches")
    layers = [
        LayerSpec(Embedding, batches.vocabulary, settings.width, settings.sequence),
        *(LayerSpec(Block, settings.width, settings.heads) for _ in range(settings.layers)),
        LayerSpec(torch.nn.LayerNorm, settings.width),
        LayerSpec(torch.nn.Linear, settings.width, batches.vocabulary, bias=False),
    ]
    with planned_nics(plan):
        module = deepspeed_pipeline_module(
            plan, layers, layers_before=1, layers_after=2, loss_fn=common.loss_of, seed_layers=True
        )
        engine, *_ = deepspeed.initialize(
            model=module,
            config={
                "train_batch_size": settings.global_batch,
                "train_micro_batch_size_per_gpu": micro_batch,
                "zero_optimization": {"stage": 1},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 1000000,
            },
            optimizer=common.make_optimizer(module, settings),
        )

        def step(number: int):
            inputs, targets = common.share_of_batch(batches, number, replica, plan.data)
            micro_batches = zip(inputs.split(micro_batch), targets.split(micro_batch), strict=True)
            loss = engine.train_batch(iter(list(micro_batches)))  # the mean over replicas, on every rank
            return loss.float()

        common.train(step, arguments.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
