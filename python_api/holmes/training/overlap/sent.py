"""Sent: what stands in .grad of a parameter whose gradient has left. Its use is an error that says what to do."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from holmes.training.overlap.awaited import ABOUT_NO_VALUES
from holmes.words import some

_DATA: Any = torch.Tensor.data

#: What nn.Module's conversions (`to`, `half`, `share_memory`) do to the gradients of its parameters.
_CONVERSIONS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "to",
        "cpu",
        "cuda",
        "half",
        "float",
        "double",
        "bfloat16",
        "share_memory_",
        "requires_grad_",
        "detach_",
        "detach",
    )
)


class SentGradient(torch.Tensor):
    """In the place of a gradient between its reduce-scatter and `step`. It has no memory and no use."""

    parameter_name: str

    @staticmethod
    def __new__(cls, like: torch.Tensor, name: str) -> SentGradient:
        """`like`: the parameter, called `name`."""
        made = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        made.parameter_name = name
        return made

    def __init__(self, like: torch.Tensor, name: str) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.parameter_name!r})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        """Code that reads or changes gradients between backward and step."""
        raise RuntimeError(
            f"the gradient of {_names((args, kwargs))} has been sent to the other ranks already, so what is done to "
            "it between backward and step has no effect. Clip with max_grad_norm= (its norm is optimizer.grad_norm), "
            "scale the loss with loss_scale= instead of a GradScaler, change gradients in "
            "parameter.register_post_accumulate_grad_hook, or accumulate inside optimizer.no_sync()"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Autograd, which would add another gradient."""
        raise RuntimeError(
            f"parameter {_names((args, kwargs))} got another gradient after those of this step, with which its bucket "
            "was sent. A step has as many backward passes as the first one had; where that changes, give "
            "accumulation_steps (and set it before the first backward pass), or, which is right whatever the model "
            "does, run all but the last in no_sync(). After a backward pass whose gradients are not wanted call "
            "zero_grad()"
        )


class HeldGradient(SentGradient):
    """In the place of a gradient that accumulates in another dtype than its parameter's, in the bucket.

    Autograd adds to it; whoever sets .grad to None drops what it holds. It has no other use.
    """

    memory: torch.Tensor

    @staticmethod
    def __new__(cls, like: torch.Tensor, name: str, view: torch.Tensor) -> HeldGradient:
        """`like`: the parameter, called `name`."""
        made = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        made.parameter_name, made.memory = name, view
        return made

    def __init__(self, like: torch.Tensor, name: str, view: torch.Tensor) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        """Code that reads or changes gradients between micro-batches."""
        raise RuntimeError(
            f"the gradient of {_names((args, kwargs))} accumulates in reduce_dtype, in the optimizer's own memory: it "
            "can be neither read nor changed through .grad; drop it with zero_grad(), or give no reduce_dtype"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Autograd's addition in place."""
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], HeldGradient) and not kwargs:
            args[0].memory.add_(dense(args[1]))
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


class SpentGradient(SentGradient):
    """In the place of a gradient with which the last step was made, until it is dropped, as torch keeps it.

    It may be dropped, zeroed, converted with its model, and added to by autograd (a GAN's generator does that to the
    discriminator, and drops it): a step with it is refused, as are reads.
    """

    _parameter: weakref.ref[torch.Tensor]

    def _converted(self, like: torch.Tensor) -> SpentGradient:
        """What stands for this one where it was to become as `like`."""
        if like.device == self.device:
            return self
        return SpentGradient(torch.empty(self.shape, dtype=like.dtype, device=like.device), self.parameter_name)

    def __init__(self, like: torch.Tensor, name: str) -> None:
        self._parameter = weakref.ref(like)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Code that looks at gradients after `step`."""
        own = args[0] if args and isinstance(args[0], SpentGradient) else None
        if own is not None and func is torch.Tensor.zero_:
            parameter = own._parameter()
            if parameter is not None:
                parameter.grad = torch.zeros(own.shape, dtype=own.dtype, device=own.device)
            return own
        if own is not None and func in _CONVERSIONS:
            return own._converted(func(torch.empty(0, dtype=own.dtype, device=own.device), *args[1:], **(kwargs or {})))
        if own is not None and func in (_DATA.__get__, _DATA.__set__):
            return own
        if own is not None and func is torch._has_compatible_shallow_copy_type:
            return own is args[1]  # nn.Module's conversions then set .data of it
        if func in ABOUT_NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise RuntimeError(
            f"the gradient of {_names((args, kwargs))} is gone: the step was made with it, and its memory is used "
            "again; zero_grad() drops it. Its norm is optimizer.grad_norm with max_grad_norm=; register "
            "parameter.register_post_accumulate_grad_hook to see gradients (this rank's own)"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Autograd, which adds another gradient to this one: neither will be used."""
        if func in (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor):
            return args[0] if isinstance(args[0], SpentGradient) else args[1]
        if func is torch.ops.aten.detach.default:
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, without autograd, as a strided tensor."""
    detached = gradient.detach()
    return detached if detached.layout == torch.strided else detached.to_dense()


def _names(values: Any) -> str:
    """The names of the parameters whose gradients are among `values`, at most three."""
    found: list[str] = []

    def visit(value: Any) -> None:
        if isinstance(value, SentGradient):
            found.append(repr(value.parameter_name))
        elif isinstance(value, Mapping):
            visit(list(value.values()))
        elif isinstance(value, list | tuple):
            for each in value:
                visit(each)

    visit(values)
    return some(found, 3)
