"""Wire: a stage's module with its boundaries in another dtype, so that fewer bytes cross the slow link."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from holmes_comm.errors import UsageError


class WireCast(nn.Module):
    """`module` with floating-point inputs that arrive, and outputs that leave, in a wire dtype.

    Autograd casts the gradients on their way back, so both directions of a boundary use the dtype. Inputs are cast to
    the dtype of the module's first floating-point parameter (none: left as they come). Values that have the dtype
    already pass as they are. The wrapped module's parameters and their names are its own.
    """

    def __init__(self, module: nn.Module, takes: torch.dtype | None, gives: torch.dtype | None) -> None:
        super().__init__()
        check_wire_dtype(takes)
        check_wire_dtype(gives)
        self.module = module
        self._takes, self._gives = takes, gives

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Casts what arrives, runs the module, casts what leaves."""
        if self._takes is not None:
            args = _cast(args, compute_dtype(self.module))
        outputs = self.module(*args, **kwargs)
        return outputs if self._gives is None else _cast(outputs, self._gives)


def compute_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype of the first floating-point parameter; None where there is none."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


def check_wire_dtype(dtype: torch.dtype | None) -> None:
    """Raises ValueError where values could not be cast to it and back."""
    if dtype is not None and not dtype.is_floating_point:
        raise UsageError(f"wire dtype {dtype} must be a floating-point one, such as torch.bfloat16")


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    def cast(value: Any) -> Any:
        is_cast = dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_cast else value

    return tree_map(cast, values)
