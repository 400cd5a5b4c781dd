"""Hooks: what an optimizer hears from its model: gradients, and modules whose forward begins or ends."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._functorch import eager_transforms, vmap
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakIdKeyDictionary

from holmes.training.overlap.parameters import Trained
from holmes.training.overlap.timeline import Timeline

_LISTENERS: weakref.WeakSet[Any] = weakref.WeakSet()


def _before_compile(*_: Any) -> None:
    for listener in list(_LISTENERS):
        listener.on_compile()


def _after_compile(*_: Any) -> None:
    for listener in list(_LISTENERS):
        listener.on_compiled()


def listen_to_compiler() -> None:
    """Local. Has `on_compile` and `on_compiled` called from now on; torch._dynamo.reset() ends that."""
    for callbacks, callback in (
        (callback_handler.start_callbacks, _before_compile),
        (callback_handler.end_callbacks, _after_compile),
    ):
        if callback not in callbacks:
            callbacks.append(callback)


def listen_to_transforms() -> None:
    """Local. Has `on_transform` called, from now on, before torch.func takes tensors: it does that in C++, where
    awaited parameters are not heard."""
    for module, name in (
        (eager_transforms, "_grad_increment_nesting"),
        (eager_transforms, "_jvp_increment_nesting"),
        (vmap, "_vmap_increment_nesting"),
    ):
        begins = getattr(module, name)
        if not hasattr(begins, "__wrapped__"):
            setattr(module, name, _heard(begins))


def listen_to_clipping() -> None:
    """Local. Has `on_clip` called, from now on, before torch.nn.utils.clip_grad_norm_ changes a gradient."""
    clips = getattr(clip_grad, "_clip_grads_with_norm_", None)  # which torch < 2.6 has not
    if clips is not None and not hasattr(clips, "hears_clipping"):
        clip_grad._clip_grads_with_norm_ = _heard_clipping(clips)


def _before_fork() -> None:
    if threading.current_thread() is threading.main_thread():
        for listener in list(_LISTENERS):
            listener.on_fork()


os.register_at_fork(before=_before_fork)


def _heard(begins: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(begins)
    def begin(*args: Any) -> int:
        for listener in list(_LISTENERS):
            listener.on_transform()
        return begins(*args)

    return begin


def _heard_clipping(clips: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(clips)
    def clip(parameters: Any, *args: Any, **options: Any) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for listener in list(_LISTENERS):
            listener.on_clip(parameters)
        clips(parameters, *args, **options)

    clip.hears_clipping = True  # type: ignore[attr-defined]
    return clip


#: Which hooks listen to a parameter.
_OWNERS: Any = WeakIdKeyDictionary()


def has_optimizer(parameter: nn.Parameter) -> bool:
    """Whether a DistributedOptimizer trains it. Local."""
    owner = _OWNERS.get(parameter, lambda: None)()
    return owner is not None and owner.is_listening


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


class ModelListener(Protocol):
    """Hears what a model does."""

    def on_gradient(self, index: int) -> None:
        """In a backward pass, parameter `index` has accumulated a gradient."""

    def on_forward(self, module: nn.Module) -> None:
        """The forward of a module begins. Not heard in code that torch.compile has compiled."""

    def on_compile(self) -> None:
        """torch.compile is about to trace something, perhaps this model."""

    def on_compiled(self) -> None:
        """That has ended."""

    def on_transform(self) -> None:
        """torch.func is about to transform something, perhaps this model."""

    def on_fork(self) -> None:
        """The process is about to fork; called in the main thread only."""

    def on_clip(self, parameters: Sequence[torch.Tensor]) -> None:
        """The gradients of `parameters`, perhaps of this model, are about to be clipped by their norm on this rank."""


class ModelHooks:
    """All hooks of one optimizer. They hold the listener weakly: an optimizer that is gone hears nothing.

    Raises ValueError where another optimizer still listens to one of the parameters.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        trained: Sequence[Trained],
        listener: ModelListener,
        timeline: Timeline,
    ) -> None:
        self._handles: list[Any] = []
        self._listener = weakref.ref(listener)
        _LISTENERS.add(listener)
        listen_to_compiler()
        listen_to_transforms()
        listen_to_clipping()
        self._timeline = timeline
        for entry in trained:
            if has_optimizer(entry.tensor):
                raise ValueError(
                    f"parameter {entry.name!r} already has a DistributedOptimizer; call that one's close() first"
                )
        for index, entry in enumerate(trained):
            _OWNERS[entry.tensor] = weakref.ref(self)
            register: Any = entry.tensor.register_post_accumulate_grad_hook
            self._handles.append(register(_gradient_hook(self._listener, index)))
        # One for each module, from now to the end: torch.compile would compile anew where hooks come or go.
        for module in {module for root in modules for module in root.modules()}:
            self._handles.append(module.register_forward_pre_hook(Hook(self._on_forward), prepend=True))
        for root in modules:
            self._handles.append(root.register_forward_pre_hook(Hook(self._forward_begins)))
            self._handles.append(root.register_forward_hook(Hook(self._forward_ended)))

    @property
    def is_listening(self) -> bool:
        """Whether the optimizer still exists and was not closed."""
        return bool(self._handles) and self._listener() is not None

    def remove(self) -> None:
        """Takes all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_forward(self, module: nn.Module, _inputs: Any) -> None:
        heard = self._listener()
        if heard is not None:
            heard.on_forward(module)

    def _forward_begins(self, _module: nn.Module, _inputs: Any) -> None:
        self._timeline.begin("compute", "forward")

    def _forward_ended(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        self._timeline.end()


def _gradient_hook(listener: weakref.ref[ModelListener], index: int) -> Callable[[nn.Parameter], None]:
    def hook(_parameter: nn.Parameter) -> None:
        heard = listener()
        if heard is not None:
            heard.on_gradient(index)

    return hook
