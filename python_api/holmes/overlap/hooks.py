"""Hooks: what an optimizer hears from its model: gradients, and modules whose forward begins or ends."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from holmes.overlap.parameters import Trained
from holmes.overlap.timeline import Timeline
from holmes.overlap.usage import UsageRecord

#: Which hooks listen to a parameter.
_OWNERS: Any = WeakIdKeyDictionary()


class Hook:
    """A module's hook that knows what it calls weakly, and nothing to code that torch.compile traces.

    A copied or pickled model has a hook in its place that does nothing and needs no Holmes.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        is_method = hasattr(call, "__self__")
        self._call: Callable[[], Callable[..., None] | None]
        self._call = weakref.WeakMethod(call) if is_method else weakref.ref(call)

    def __call__(self, *args: Any) -> None:
        """Calls what still exists."""
        if torch.compiler.is_compiling():
            return
        call = self._call()
        if call is not None:
            call(*args)

    def __reduce__(self) -> Any:
        """A function of the standard library that takes any arguments and does nothing."""
        return getattr, (contextlib.nullcontext(), "__exit__")


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
        self._record, self._timeline = record, timeline
        for entry in trained:
            owner = _OWNERS.get(entry.tensor, lambda: None)()
            if owner is not None and owner.is_listening:
                raise ValueError(
                    f"parameter {entry.name!r} already has a DistributedOptimizer; call that one's close() first"
                )
        for index, entry in enumerate(trained):
            _OWNERS[entry.tensor] = weakref.ref(self)
            register: Any = entry.tensor.register_post_accumulate_grad_hook
            self._handles.append(register(_gradient_hook(self._listener, index)))
        self._recording = [
            module.register_forward_pre_hook(Hook(self._saw_module), prepend=True)
            for root in modules
            for module in root.modules()
        ]
        for root in modules:
            self._handles.append(root.register_forward_pre_hook(Hook(self._forward_begins)))
            self._handles.append(root.register_forward_hook(Hook(self._forward_ended)))

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

    def _saw_module(self, module: nn.Module, _inputs: Any) -> None:
        self._record.saw_module(module)

    def _forward_begins(self, _module: nn.Module, _inputs: Any) -> None:
        self._timeline.begin("compute", "forward")

    def _forward_ended(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        self._timeline.end()


def _gradient_hook(listener: weakref.ref[GradientListener], index: int) -> Callable[[nn.Parameter], None]:
    def hook(_parameter: nn.Parameter) -> None:
        heard = listener()
        if heard is not None:
            heard.on_gradient(index)

    return hook
