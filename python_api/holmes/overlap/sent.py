"""Sent: what stands in .grad of a parameter whose gradient has left. Any use of it is an error that says what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch


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
            "accumulation_steps (and set it before the first backward pass), or run all but the last in no_sync(). "
            "After a backward pass whose gradients are not wanted call zero_grad()"
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
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
