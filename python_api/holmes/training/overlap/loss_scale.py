"""Loss scale: keeps small 16-bit gradients above zero, by torch.amp.GradScaler's rule."""

from __future__ import annotations

from typing import Any, Literal


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
        self.value = initial if scale == "dynamic" else float(scale)
        if not self.value > 0:
            raise ValueError(f'loss_scale={scale!r} must be above 0, or "dynamic"')
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
