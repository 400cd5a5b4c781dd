"""Device: what a rank of the demo trains on, and how fast. Emulated nodes share this machine's GPUs and cores."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from holmes.lab.demo.settings import choose_device
from holmes_comm.errors import UsageError


def rank_device(name: str) -> torch.device:
    """This rank's device, made torch's current one: for "cuda" its GPU, taken in turns by rank. Local.

    Call it before the process group is made: NCCL takes ranks of one GPU only where it believes them on different
    hosts, which the environment tells it. Raises ValueError as choose_device does.
    """
    if choose_device(name) == "cpu":
        return torch.device("cpu")
    rank = int(os.environ.get("RANK", "0"))
    os.environ.setdefault("NCCL_HOSTID", f"holmes-demo-{rank}")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def finish(device: torch.device) -> None:
    """Waits for what a step put on the current stream: its time is that of the work, not of the launches. What other
    streams still carry, such as parameters on their way to the next step, goes on."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def slow_down(modules: Iterable[nn.Module], factor: float) -> None:
    """Forward and backward of each module take `factor` times as long; at 1 nothing changes. Local.

    After each the thread sleeps for factor - 1 times the processor time that it took: as beside a slower device, the
    node's processor is free meanwhile, and gradients of earlier modules are already on their way. Raises ValueError for
    a factor below 1: no emulation makes a processor faster.
    """
    if not factor >= 1:
        raise UsageError(f"slowdown={factor} must be at least 1, which is the machine's own speed")
    if factor == 1:
        return
    for module in modules:
        pause = _Pause(factor)
        module.register_forward_pre_hook(pause.begin)
        module.register_forward_hook(pause.end)
        module.register_full_backward_pre_hook(pause.begin)
        module.register_full_backward_hook(pause.end)


class _Pause:
    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._begun_s = 0.0

    def begin(self, *_: Any) -> None:
        self._begun_s = time.thread_time()

    def end(self, *_: Any) -> None:
        time.sleep((self._factor - 1) * (time.thread_time() - self._begun_s))
