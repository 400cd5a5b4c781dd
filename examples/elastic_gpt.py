"""A small GPT, pipeline and data parallel on a plan, that goes on when nodes are lost and takes them back.

    holmes store --listen head                                                           # on a host that stays
    HOLMES_STORE=head:29400 python examples/elastic_gpt.py --checkpoints /shared/run     # every process of every node

from a launcher that lets the others live when one ends (docs/recovery.md); torchrun runs it too, and ends all with the
first. Without a launcher it is a job of one process.
"""

import argparse
import dataclasses
import json
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import holmes
from holmes.lab.demo.model import Batches, Stage, loss_of
from holmes.lab.demo.settings import Settings
from holmes.lab.demo.train_holmes import example


def train(
    run: holmes.Generation, settings: Settings, until: int, after_step: Callable[[int], None] = lambda step: None
) -> None:
    """Called anew for each generation, in the same process; whatever it makes fits this generation's plan."""
    torch.manual_seed(settings.seed)
    plan, groups = run.plan, run.groups
    batch = plan.global_batch or settings.global_batch  # another one where these ranks cannot share it equally
    settings = dataclasses.replace(settings, pipeline=plan.pipeline, global_batch=batch)
    batches = Batches(settings)
    first_layer = plan.layers_of(run.stage).start
    model = Stage(settings, batches.vocabulary, plan.layers_of(run.stage))

    def global_name(name: str) -> str:
        """Every stage counts its blocks from 0; checkpoints hold the whole model."""
        kind, _, rest = name.partition(".")
        number, _, rest = rest.partition(".")
        return f"blocks.{int(number) + first_layer}.{rest}" if kind == "blocks" else name

    optimizer = holmes.DistributedOptimizer(
        model, torch.optim.AdamW, lr=settings.learning_rate, group=groups.dp, name_of=global_name
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    run.restore(model=model, optimizer=optimizer, scheduler=scheduler, name_of=global_name)

    micro_batches = settings.micro_batches
    micro_batch = settings.share(plan.data * micro_batches, "data-parallel ranks * micro-batches")
    share, replica = micro_batch * micro_batches, dist.get_rank(groups.dp)
    stage = PipelineStage(
        model,
        run.stage,
        plan.pipeline,
        torch.device("cpu"),
        input_args=example(settings, batches.vocabulary, micro_batch, run.stage),
        output_args=example(settings, batches.vocabulary, micro_batch, run.stage + 1),
        group=groups.pp,
    )
    schedule = ScheduleGPipe(
        stage, micro_batches, lambda logits, targets: loss_of(logits, targets) / micro_batches, scale_grads=False
    )
    for step in run.steps(until):
        inputs, targets = (tensor[replica * share :][:share] for tensor in batches.batch(step))
        losses: list[torch.Tensor] = []
        schedule.step(*([inputs] if stage.is_first else []), target=targets if stage.is_last else None, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        report(run, step, losses)
        after_step(step)


def report(run: holmes.Generation, step: int, losses: list[torch.Tensor]) -> None:
    """Prints the loss over the global batch: the mean of the ranks that have one."""
    total = torch.tensor([torch.stack(losses).sum().item(), 1.0] if losses else [0.0, 0.0], dtype=torch.float64)
    dist.all_reduce(total)
    if run.rank == 0:
        loss = (total[0] / total[1]).item()
        line = {"step": step, "loss": loss, "generation": run.number, "ranks": run.world_size}
        print(json.dumps(line), flush=True)


def make_plan(topology: holmes.Topology, settings: Settings) -> holmes.Plan:
    """The sizes of the settings, or the nearest that those who are there can hold."""
    return holmes.workable_plan(
        topology, model_layers=settings.layers, pipeline=settings.pipeline, global_batch=settings.global_batch
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", required=True, help="a folder that all hosts share")
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # emulated nodes share this machine's processors
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("holmes.training.overlap").setLevel(logging.WARNING)  # a line each step
    settings = Settings(global_batch=24, steps=arguments.steps)
    holmes.run_elastic(
        lambda run: train(run, settings, settings.steps),
        plan=lambda topology: make_plan(topology, settings),
        checkpoints=arguments.checkpoints,
        every_steps=arguments.every,
    )


if __name__ == "__main__":
    main()
