"""Hooks: what an optimizer hears from its model: gradients, and modules whose forward begins or ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from holmes.overlap.parameters import Trained
from holmes.overlap.timeline import Timeline
from holmes.overlap.usage import UsageRecord

_OWNER = "_holmes_optimizer"  # attribute of a parameter: a weak reference to the hooks that listen to it


class GradientListener(Protocol):
    """Hears that parameter `index` has accumulated a gradient."""

    def on_gradient(self, index: int) -> None:
        """Called in the backward pass."""


class ModelHooks:
    """All hooks of one optimizer. They hold the listener weakly: an optimizer that is gone hears nothing.

    Raises ValueError where another optimizer still listens to one of the parameters.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        trained: Sequence[Trained],
        listener: GradientListener,
        record: UsageRecord,
        timeline: Timeline,
    ) -> None:
        self._handles: list[Any] = []
        self._listener = weakref.ref(listener)
        for entry in trained:
            owner = getattr(entry.tensor, _OWNER, lambda: None)()
            if owner is not None and owner.is_listening:
                raise ValueError(
                    f"parameter {entry.name!r} already has a DistributedOptimizer; call that one's close() first"
                )
        for index, entry in enumerate(trained):
            setattr(entry.tensor, _OWNER, weakref.ref(self))
            register: Any = entry.tensor.register_post_accumulate_grad_hook
            self._handles.append(register(_gradient_hook(self._listener, index)))
        self._recording = [
            module.register_forward_pre_hook(lambda module, _: record.saw_module(module), prepend=True)
            for root in modules
            for module in root.modules()
        ]
        for root in modules:
            self._handles.append(root.register_forward_pre_hook(lambda *_: timeline.begin("compute", "forward")))
            self._handles.append(root.register_forward_hook(lambda *_: timeline.end()))

    @property
    def is_listening(self) -> bool:
        """Whether the optimizer still exists and was not closed."""
        return bool(self._handles) and self._listener() is not None

    def stop_recording(self) -> None:
        """The order of the modules is known."""
        for handle in self._recording:
            handle.remove()
        self._recording.clear()

    def remove(self) -> None:
        """Takes all hooks away."""
        self.stop_recording()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _gradient_hook(listener: weakref.ref[GradientListener], index: int) -> Callable[[nn.Parameter], None]:
    def hook(_parameter: nn.Parameter) -> None:
        heard = listener()
        if heard is not None:
            heard.on_gradient(index)

    return hook
