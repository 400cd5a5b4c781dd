"""Loss scale: keeps small 16-bit gradients above zero, by torch.amp.GradScaler's rule."""

from __future__ import annotations

import math
from typing import Any, Literal

from holmes.training.arguments import above_zero
from holmes_comm.errors import UsageError


class LossScale:
    """`value` multiplies the loss; after a step whose gradients overflowed it halves, after many good ones it doubles.

    `scale`: "dynamic", or a fixed number.
    """

    def __init__(
        self,
        scale: float | Literal["dynamic"],
        *,
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.is_dynamic = scale == "dynamic"
        self.value = initial if self.is_dynamic else above_zero("loss_scale", scale, ', or "dynamic"')
        if not math.isfinite(self.value):
            raise UsageError(f'loss_scale={scale!r} makes every loss infinite; give a finite number, or "dynamic"')
        self._growth, self._backoff, self._interval = growth, backoff, growth_interval
        self._good_steps = 0

    def update(self, *, found_inf: bool) -> None:
        """After a step, skipped (`found_inf`) or done."""
        if not self.is_dynamic:
            return
        if found_inf:
            self.value *= self._backoff
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._interval:
            self.value *= self._growth
            self._good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Numbers only."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse; a fixed scale stays what the constructor said."""
        if self.is_dynamic:
            self.value, self._good_steps = float(state["value"]), int(state["good_steps"])
