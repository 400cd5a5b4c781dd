"""What arguments must be. Each function raises UsageError naming the argument, its value and the rule."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from holmes_comm.errors import UsageError

__all__ = ["above_zero", "finite_above_zero", "floating_dtype", "process_group", "whole"]


def whole(name: str, value: Any, else_: str = "") -> int:
    """A whole number of 1 or more. `else_`: what else it can be, in words."""
    if not (_is_number(value) and 1 <= value < math.inf and value == int(value)):
        raise UsageError(f"{name}={value!r} must be a whole number, 1 or more{else_}")
    return int(value)


def above_zero(name: str, value: Any, else_: str) -> float:
    """A number above 0, also infinity. `else_`: what else it can be, in words."""
    if not (_is_number(value) and value > 0):
        raise UsageError(f"{name}={value!r} must be above 0{else_}")
    return float(value)


def finite_above_zero(name: str, value: Any, else_: str) -> float:
    """A number above 0 and below infinity. `else_`: what else it can be, in words."""
    if not math.isfinite(above_zero(name, value, else_)):
        raise UsageError(f"{name}={value!r} must be above 0 and finite{else_}")
    return float(value)


def floating_dtype(name: str, value: Any) -> torch.dtype:
    """A dtype that gradients can have."""
    if not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise UsageError(f"{name}={value!r} must be a floating-point torch.dtype, such as torch.float32")
    return value


def process_group(name: str, value: Any) -> dist.ProcessGroup:
    """A group that this rank is in."""
    if value is dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError(f"{name}: this rank is not in that group; leave out what is for its members, or give another")
    if not isinstance(value, dist.ProcessGroup):
        raise UsageError(f"{name}={value!r} must be a process group, as torch.distributed.new_group makes it")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
