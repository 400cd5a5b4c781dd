"""Slow compute: lets a rank compute as on a slower device. Emulated nodes share this machine's processor cores."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from torch import nn

from holmes_comm.errors import UsageError


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
