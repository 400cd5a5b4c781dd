"""What bench_overlap compares: ways to train the same model over two ranks, and the compute alone."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holmes
from holmes.lab.demo.model import Batches, Stage, loss_of
from holmes.lab.demo.settings import Settings
from holmes.tools.bench.timing import machine_cpu_s


@dataclass(frozen=True)
class PacedSettings(Settings):
    """`pause_s`: what a step takes beside its computation without using a processor, as work of an accelerator does."""

    pause_s: float = 0.0


class Pause(torch.autograd.Function):
    """The identity, which takes `pause_s` forward and twice that backward, and no processor."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, pause_s: float) -> torch.Tensor:
        ctx.pause_s = pause_s
        time.sleep(pause_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.pause_s)
        return gradient, None


def pause_in(module: torch.nn.Module, pause_s: float) -> None:
    """Spreads `pause_s` of a step over the linear layers by their parameters, as compute is."""
    layers = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
    total = sum(layer.weight.numel() for layer in layers)
    for layer in layers:
        forward_s = pause_s / 3 * layer.weight.numel() / total
        layer.register_forward_hook(lambda _, inputs, output, s=forward_s: Pause.apply(output, s))


class Variant:
    """A way to train the model: `turn(steps)` trains; `settings.pause_s` is spread over the layers."""

    def __init__(self, settings: PacedSettings, batches: Batches, title: str) -> None:
        self.title = title
        model = Stage(settings, batches.vocabulary, range(settings.layers))
        if settings.pause_s:
            pause_in(model.blocks, settings.pause_s)
        self.model: torch.nn.Module = model
        self.batches, self.share = batches, settings.global_batch // dist.get_world_size()
        self.optimizer: torch.optim.Optimizer
        self.step_number = 0
        self.step_s: list[float] = []
        self.others_cores: list[float] = []
        self.cpu_s: list[float] = []  # of a step, all threads of a rank, mean of the ranks

    def adam(self, parameters) -> None:
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    def step(self) -> None:
        rank = dist.get_rank()
        inputs, targets = (t[rank * self.share :][: self.share] for t in self.batches.batch(self.step_number))
        loss_of(self.model(inputs), targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_number += 1

    def turn(self, steps: int) -> None:
        """A few steps; the first two are not counted, as what they wait for may be from before the turn."""
        for _ in range(2):
            self.step()
        start_s, own_s, machine_s = time.monotonic(), time.process_time(), machine_cpu_s()
        for _ in range(steps):
            self.step()
        wall_s = time.monotonic() - start_s
        machine_s, own = machine_cpu_s() - machine_s, torch.tensor([time.process_time() - own_s])
        taken = torch.tensor([wall_s / steps])
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        dist.all_reduce(own)
        self.step_s.append(taken.item())
        self.others_cores.append(max(machine_s - own.item(), 0) / wall_s)
        self.cpu_s.append(own.item() / steps / dist.get_world_size())
        if isinstance(self.optimizer, holmes.DistributedOptimizer):
            self.optimizer.synchronize()


class Ours(Variant):
    def __init__(self, settings, batches, title, group, **options) -> None:
        super().__init__(settings, batches, title)
        self.optimizer = holmes.DistributedOptimizer(self.model, torch.optim.AdamW, lr=1e-3, group=group, **options)
        self.reports: list[holmes.training.overlap.StepReport] = []

    def step(self) -> None:
        super().step()
        self.reports.append(self.optimizer.last_report)


class Alone(Variant):
    """Sends nothing but the word that its step is done, for which the other rank waits, as in any synchronous step."""

    def step(self) -> None:
        super().step()
        dist.barrier()


def compute_alone(settings: PacedSettings, batches: Batches, title: str) -> Variant:
    """The optimizer steps half of the elements, as a rank of two does where it is sharded."""
    alone = Alone(settings, batches, title)
    parameters, half = sorted(alone.model.parameters(), key=torch.Tensor.numel, reverse=True), []
    total = sum(p.numel() for p in parameters)
    for parameter in parameters:
        if sum(p.numel() for p in half) + parameter.numel() <= total / 2:
            half.append(parameter)
    alone.adam(half)
    alone.optimizer.zero_grad = lambda: alone.model.zero_grad()  # type: ignore[method-assign, misc]
    return alone


def ddp(settings: PacedSettings, batches: Batches, title: str, group: dist.ProcessGroup) -> Variant:
    variant = Variant(settings, batches, title)
    variant.model = DistributedDataParallel(variant.model, process_group=group, gradient_as_bucket_view=True)
    variant.adam(variant.model.parameters())
    return variant


def zero(settings: PacedSettings, batches: Batches, title: str, group: dist.ProcessGroup) -> Variant:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    variant = ddp(settings, batches, title, group)
    variant.optimizer = ZeroRedundancyOptimizer(
        variant.model.parameters(), torch.optim.AdamW, process_group=group, lr=1e-3, fused=True
    )
    return variant


def fsdp(settings: PacedSettings, batches: Batches, title: str, group: dist.ProcessGroup) -> Variant:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    variant = Variant(settings, batches, title)
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in variant.model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(variant.model, mesh=mesh, reshard_after_forward=False)
    variant.adam(variant.model.parameters())
    return variant


def make_variants(settings, batches, groups, bucket_bytes, only) -> list[Variant]:
    """The first is the compute alone, the second DistributedOptimizer; then those whose title has a word of `only`."""

    def ours(settings, batches, title, group):
        return Ours(settings, batches, title, group, bucket_bytes=bucket_bytes)

    makers = {"DistributedOptimizer": ours, "DDP": ddp, "DDP + ZeroRedundancyOptimizer": zero, "FSDP2": fsdp}
    variants = [compute_alone(settings, batches, "compute")]
    for backend, group in groups.items():
        for name, maker in makers.items():
            title = f"{name}, {backend}"
            if len(variants) == 1 or not only or any(word in title for word in only):
                variants.append(maker(settings, batches, title, group))
    return variants
