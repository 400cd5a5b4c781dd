"""torch, cupy and numpy as the kernels see them: where an array is, and the operations that stand in for kernels."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from holmes_comm.errors import UsageError

__all__ = ["ArrayLibrary", "library_of"]


class ArrayLibrary(Protocol):
    """What is done with arrays of one library. Stand-ins compute in float32 (float64 where an array is of it)."""

    name: str

    def dtype_of(self, array: Any) -> str:
        """ "float32" and the like."""

    def flat(self, array: Any) -> Any:
        """The array as one dimension, without a copy. Raises UsageError where it is not contiguous."""

    def address(self, array: Any) -> int:
        """Of its first element."""

    def gpu_of(self, array: Any) -> Any | None:
        """The GPU that holds it, to compare with others'; None: host memory."""

    def on_gpu(self, array: Any) -> contextlib.AbstractContextManager[Any]:
        """While it is open, the array's GPU is the current one."""

    def stream(self) -> int:
        """The current stream of the current GPU."""

    def empty_float64(self, count: int, like: Any) -> Any:
        """Memory beside `like`."""

    def move(self, target: Any, source: Any, scale: float, *, adds: bool) -> None:
        """target = source * scale, or target += source * scale."""

    def sum_shards(self, output: Any, shards: Sequence[Any], scale: float) -> None:
        """output = the sum of the shards * scale."""

    def squared_norm(self, arrays: Sequence[Any], weights: Sequence[float]) -> Any:
        """float64 scalar: the sum of weight * sum of squares."""


class _Torch:
    name = "torch"

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def dtype_of(self, array: Any) -> str:
        return str(array.dtype).removeprefix("torch.")

    def flat(self, array: Any) -> Any:
        if not array.is_contiguous():
            raise UsageError(f"a tensor of shape {tuple(array.shape)} is not contiguous; pass tensor.contiguous()")
        return array.detach().view(-1)

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def gpu_of(self, array: Any) -> Any | None:
        return array.device if array.is_cuda else None

    def on_gpu(self, array: Any) -> contextlib.AbstractContextManager[Any]:
        return self._torch.cuda.device(array.device)

    def stream(self) -> int:
        return int(self._torch.cuda.current_stream().cuda_stream)

    def empty_float64(self, count: int, like: Any) -> Any:
        return self._torch.empty(count, dtype=self._torch.float64, device=like.device)

    def _wide(self, *arrays: Any) -> Any:
        has_double = any(array.dtype == self._torch.float64 for array in arrays)
        return self._torch.float64 if has_double else self._torch.float32

    def move(self, target: Any, source: Any, scale: float, *, adds: bool) -> None:
        wide = self._wide(target, source)
        value = source.to(wide)
        if scale != 1.0:
            value = value * scale
        if adds:
            value = target.to(wide) + value
        target.copy_(value)

    def sum_shards(self, output: Any, shards: Sequence[Any], scale: float) -> None:
        total = self._torch.zeros_like(output, dtype=self._wide(output, *shards))
        for shard in shards:
            total += shard
        output.copy_(total * scale)

    def squared_norm(self, arrays: Sequence[Any], weights: Sequence[float]) -> Any:
        norm = functools.partial(self._torch.linalg.vector_norm, dtype=self._torch.float64)
        terms = [weight * norm(array).square() for array, weight in zip(arrays, weights, strict=True)]
        return self._torch.stack(terms).sum()


class _Numpy:
    """numpy, or cupy, which has the same functions."""

    def __init__(self, module: Any) -> None:
        self.name = module.__name__
        self._module = module

    def dtype_of(self, array: Any) -> str:
        return str(array.dtype)

    def flat(self, array: Any) -> Any:
        if not array.flags.c_contiguous:
            raise UsageError(f"an array of shape {array.shape} is not contiguous; pass ascontiguousarray(array)")
        return array.reshape(-1)

    def address(self, array: Any) -> int:
        return int(array.data.ptr if self.name == "cupy" else array.ctypes.data)

    def gpu_of(self, array: Any) -> Any | None:
        return array.device.id if self.name == "cupy" else None

    def on_gpu(self, array: Any) -> contextlib.AbstractContextManager[Any]:
        guard: contextlib.AbstractContextManager[Any] = self._module.cuda.Device(array.device.id)
        return guard

    def stream(self) -> int:
        return int(self._module.cuda.get_current_stream().ptr)

    def empty_float64(self, count: int, like: Any) -> Any:
        with self.on_gpu(like):
            return self._module.empty(count, dtype="float64")

    def _wide(self, *arrays: Any) -> str:
        return "float64" if any(array.dtype == "float64" for array in arrays) else "float32"

    def _quiet(self) -> contextlib.AbstractContextManager[Any]:
        # What is too large for 16 bits becomes infinite, as in torch and in the kernels.
        quiet: contextlib.AbstractContextManager[Any] = (
            self._module.errstate(over="ignore", invalid="ignore") if self.name == "numpy" else contextlib.nullcontext()
        )
        return quiet

    def move(self, target: Any, source: Any, scale: float, *, adds: bool) -> None:
        wide = self._wide(target, source)
        value = source.astype(wide) * self._module.dtype(wide).type(scale)
        if adds:
            value = target.astype(wide) + value
        with self._quiet():
            target[...] = value.astype(target.dtype)

    def sum_shards(self, output: Any, shards: Sequence[Any], scale: float) -> None:
        wide = self._wide(output, *shards)
        total = self._module.zeros(output.shape, dtype=wide)
        for shard in shards:
            total += shard.astype(wide)
        with self._quiet():
            output[...] = (total * self._module.dtype(wide).type(scale)).astype(output.dtype)

    def squared_norm(self, arrays: Sequence[Any], weights: Sequence[float]) -> Any:
        total = self._module.zeros((), dtype="float64")
        for array, weight in zip(arrays, weights, strict=True):
            wide = array.astype("float64")
            total = total + weight * self._module.dot(wide, wide)
        return total


@functools.cache
def _library(name: str) -> ArrayLibrary:
    return _Torch() if name == "torch" else _Numpy(sys.modules[name])


def library_of(array: Any) -> ArrayLibrary:
    """The library that made `array`. Raises UsageError for any other than torch, cupy and numpy."""
    for base in type(array).__mro__:
        name = base.__module__.partition(".")[0]
        if name in ("torch", "cupy", "numpy"):
            return _library(name)
    raise UsageError(
        f"{type(array).__name__} is none of torch.Tensor, cupy.ndarray and numpy.ndarray; pass one of them"
    )
