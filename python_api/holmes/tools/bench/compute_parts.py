"""The parts that `holmes bench compute` times, as calls on torch modules."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from holmes.planning.model.gpt_torch import Block, Embedding, Head, loss_of
from holmes.tools.bench.compute import ComputeSettings
from holmes.training.overlap import DistributedOptimizer
from holmes.training.overlap.link import TAIL_SHARE


@dataclass(frozen=True)
class Part:
    """`call` runs it once and returns the seconds of its forward and its backward (0: it has none); `units`: what
    these are divided by, so that they are of one layer or one parameter."""

    call: Callable[[], tuple[float, float]]
    units: int = 1


def make_parts(settings: ComputeSettings) -> dict[str, Part]:
    """The parts by name. Sets the threads of this process."""
    torch.set_num_threads(settings.threads)
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    width, shape = settings.hidden, (settings.micro_batch, settings.sequence)

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def place(module: nn.Module) -> nn.Module:
        return module.to(device, dtype)

    tokens = torch.randint(settings.vocabulary, shape, device=device)
    hidden = torch.randn(*shape, width, device=device, dtype=dtype)
    layers = place(nn.Sequential(*(Block(width, settings.heads) for _ in range(settings.layers))))
    embedding = place(Embedding(settings.vocabulary, settings.sequence, width))
    head = place(Head(settings.vocabulary, width))
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)

    def timed(forward: Callable[[], torch.Tensor], gradient: torch.Tensor | None) -> tuple[float, float]:
        start = time.perf_counter()
        output = forward()
        synchronize()
        middle = time.perf_counter()
        output.backward(gradient)  # type: ignore[no-untyped-call]
        synchronize()
        return middle - start, time.perf_counter() - middle

    def pass_through(module: nn.Module) -> tuple[float, float]:
        return timed(lambda: module(hidden.detach().requires_grad_()), hidden)

    def update(optimizer: torch.optim.Optimizer) -> float:
        start = time.perf_counter()
        optimizer.step()
        synchronize()
        return time.perf_counter() - start

    @functools.cache
    def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = copy.deepcopy(layers)
        size_bytes = sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())
        # Of one rank, so nothing is sent: what sending costs is the links' part. Buckets as large as they ever are.
        return module, DistributedOptimizer(module, torch.optim.AdamW, bucket_bytes=int(size_bytes * TAIL_SHARE))

    def sharding() -> tuple[float, float]:
        module, its_optimizer = sharded()
        plain_s = pass_through(layers)[1] + update(optimizer)
        sharded_s = pass_through(module)[1] + update(its_optimizer)
        its_optimizer.zero_grad()
        return sharded_s - plain_s, 0.0

    parameters = sum(parameter.numel() for parameter in layers.parameters())
    return {
        "embedding": Part(lambda: timed(lambda: embedding(tokens), hidden)),
        "layer": Part(lambda: pass_through(layers), settings.layers),
        "head": Part(lambda: timed(lambda: loss_of(head(hidden.detach().requires_grad_()), tokens), None)),
        "optimizer": Part(lambda: (update(optimizer), 0.0), parameters),
        "sharding": Part(sharding, parameters),
    }
