"""With Holmes: discovery -> clusters -> plan -> process groups, then the overlapped optimizer and torch's pipeline."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import ScheduleGPipe

import holmes
from holmes.lab.demo.device import finish, rank_device, slow_down
from holmes.lab.demo.model import Batches, Stage, loss_of
from holmes.lab.demo.record import Recorder
from holmes.lab.demo.settings import Settings, rank_arguments


class TimedStage(holmes.PipelineStage):
    """Records when it computes and when it waits for the pipeline."""

    recorder: Recorder
    waits_since = 0.0

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The schedule asks for a receive, and waits for it where it is not posted ahead."""
        self.waits_since = time.monotonic()
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The schedule asks for a receive, and waits for it where it is not posted ahead."""
        self.waits_since = time.monotonic()
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Waits for the input, then computes."""
        self.await_input("forward", fwd_chunk_id)
        if not self.is_first:
            self.recorder.add("pipeline wait", self.waits_since)
        with self.recorder.span("forward"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Waits for the gradient, then computes."""
        self.await_input("backward", bwd_chunk_id)
        if not self.is_last:
            self.recorder.add("pipeline wait", self.waits_since)
        with self.recorder.span("backward"):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


def example(
    settings: Settings, vocabulary: int, samples: int, boundary: int, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """A tensor such as enters stage `boundary`: token ids, activations or, behind the last stage, logits."""
    if boundary == 0:
        return torch.zeros(samples, settings.sequence, dtype=torch.int64, device=device)
    width = settings.width if boundary < settings.pipeline else vocabulary
    return torch.zeros(samples, settings.sequence, width, requires_grad=True, device=device)


def main() -> None:
    """Pipeline across the clusters, data parallel inside each."""
    settings, backend = rank_arguments()
    torch.set_num_threads(1)
    device = rank_device(settings.device)
    dist.init_process_group(backend)
    if settings.plan:
        plan = holmes.Plan.load(settings.plan)
    else:
        plan = holmes.make_plan(model_layers=settings.layers, pipeline=settings.pipeline)
    groups = holmes.process_groups(plan, backend)
    rank = dist.get_rank()
    stage_index, replica = plan.stage_of(rank), dist.get_rank(groups.dp)
    micro_batch = settings.share(plan.data * settings.micro_batches, "data-parallel ranks * micro-batches")
    share = micro_batch * settings.micro_batches

    batches = Batches(settings)
    model = Stage(settings, batches.vocabulary, plan.layers_of(stage_index)).to(device)
    slow_down(model.blocks, settings.slowdown.get(os.environ.get("HOLMES_HOSTNAME", ""), 1.0))
    optimizer = holmes.DistributedOptimizer(model, torch.optim.AdamW, lr=settings.learning_rate, group=groups.dp)
    counted = [("tp", groups.tp), ("pp", groups.pp), *(("dp", group) for group in optimizer.process_groups)]
    recorder = Recorder(settings, counted if backend == "holmes" else (), plan.to_dict() if rank == 0 else None)
    stage = TimedStage(
        model,
        stage_index,
        plan.pipeline,
        device,
        input_args=example(settings, batches.vocabulary, micro_batch, stage_index, device),
        output_args=example(settings, batches.vocabulary, micro_batch, stage_index + 1, device),
        group=groups.pp,
        posts_ahead=settings.overlap,
    )
    stage.recorder = recorder

    def share_of_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(logits, targets) / settings.micro_batches

    # The loss is scaled, not the gradients after the backward pass: they are on their way then.
    schedule = ScheduleGPipe(stage, settings.micro_batches, share_of_loss, scale_grads=False)

    def step(number: int) -> float | None:
        inputs, targets = (tensor[replica * share :][:share].to(device) for tensor in batches.batch(number))
        losses: list[torch.Tensor] = []
        with nullcontext() if settings.overlap else optimizer.no_sync():
            target = targets if stage.is_last else None
            schedule.step(*([inputs] if stage.is_first else []), target=target, losses=losses)
        with recorder.span("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
            if not settings.overlap:
                optimizer.synchronize()
            finish(device)
        assert optimizer.last_report is not None
        for span in optimizer.last_report.spans:
            recorder.add("data parallel", span.start_s, span.end_s)
        if number == settings.steps - 1:  # bytes are counted now: the last all-gathers must be through
            optimizer.synchronize()
            dist.barrier()
        return torch.stack(losses).sum().item() if stage.is_last else None

    dist.barrier()
    recorder.train(step)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
