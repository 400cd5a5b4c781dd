"""Awaited: parameters whose new values are still on their way. Whoever uses one waits for it, wherever that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

_GRAD: Any = torch.Tensor.grad

#: What says nothing of a parameter's values: asking for it waits for nothing.
ABOUT_NO_VALUES = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "requires_grad", "is_cuda")
) | {
    _GRAD.__get__,
    _GRAD.__set__,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
}


class _Use:
    """Part of the class that awaited parameters have: the first use of a value waits, and ends the waiting."""

    wait: ClassVar[Callable[[], None]]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in ABOUT_NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for kind in types:
            if issubclass(kind, _Use):
                kind.wait()
        return func(*args, **(kwargs or {}))  # the parameters are of their own class again

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        type(self).wait()
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        type(self).wait()
        return self.__reduce_ex__(protocol)


class AwaitedParameters:
    """The parameters of one bucket. From `begin` to `end` they are of a class whose every use calls `wait` first.

    `wait` must lead to `end`. The class is a subclass of each parameter's own; torch changes the class of a
    parameter in the same way (torch.nn.UninitializedParameter).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], wait: Callable[[], None]) -> None:
        plain = {type(parameter) for parameter in parameters}
        awaited = {
            cls: type(f"Awaited{cls.__name__}", (_Use, cls), {"wait": staticmethod(wait), "__module__": cls.__module__})
            for cls in plain
        }
        self._classes = [(parameter, type(parameter), awaited[type(parameter)]) for parameter in parameters]

    def begin(self) -> None:
        """The values are on their way."""
        for parameter, _, awaited in self._classes:
            parameter.__class__ = awaited

    def end(self) -> None:
        """The values are there."""
        for parameter, plain, _ in self._classes:
            parameter.__class__ = plain
