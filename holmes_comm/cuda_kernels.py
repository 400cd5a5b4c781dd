"""libholmes_cuda, the CUDA kernels (csrc/kernels/interface.hpp), where the build made it: found beside this package."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holmes_comm.errors import SystemError

__all__ = ["DTYPES", "MOVES", "Kernels", "load"]

#: Data types that the kernels know, with the numbers of holmes::DType.
DTYPES = {"float32": 1, "float16": 2, "bfloat16": 3}
_LIBRARY = Path(__file__).parent / "lib" / "libholmes_cuda.so"


class _Segment(ctypes.Structure):
    _fields_ = (("tensor", ctypes.c_void_p), ("count", ctypes.c_size_t), ("bucket_offset", ctypes.c_size_t))


MOVES = ("pack", "unpack", "accumulate")
_MOVE_ARGUMENTS = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_uint8,
    ctypes.POINTER(_Segment),
    ctypes.c_size_t,
    ctypes.c_uint8,
    ctypes.c_float,
    ctypes.c_void_p,
)


class _NormTensor(ctypes.Structure):
    _fields_ = (("tensor", ctypes.c_void_p), ("count", ctypes.c_size_t), ("weight", ctypes.c_float))


class Kernels:
    """The library's functions; arrays are addresses of the current device's memory. Thread-safe.

    Every call queues its work on `stream` (a cudaStream_t) and raises SystemError with the library's reason.
    """

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.holmes_cuda_last_error.restype = ctypes.c_char_p
        self._library.holmes_cuda_norm_workspace_count.restype = ctypes.c_size_t
        #: How many float64 numbers squared_norm needs as its workspace.
        self.norm_workspace_count: int = self._library.holmes_cuda_norm_workspace_count()
        self._moves = {kind: getattr(self._library, f"holmes_cuda_{kind}") for kind in MOVES}
        for function in self._moves.values():
            function.argtypes = _MOVE_ARGUMENTS

    def move_table(
        self, bucket: tuple[int, int, str], segments: Sequence[tuple[int, int, int]], dtype: str
    ) -> tuple[Any, ...]:
        """What `move` takes. `bucket`: address, count, dtype; `segments`: address, count and offset of each tensor of
        `dtype`.
        """
        address, count, bucket_dtype = bucket
        table = (_Segment * len(segments))(*itertools.starmap(_Segment, segments))
        return (address, count, DTYPES[bucket_dtype], table, len(segments), DTYPES[dtype])

    def move(self, kind: str, table: tuple[Any, ...], scale: float, stream: int) -> None:
        """`kind`: one of MOVES; `table`: of `move_table`."""
        self._check(self._moves[kind](*table, scale, stream))

    def sum_shards(
        self, output: tuple[int, str], shards: Sequence[int], dtype: str, count: int, scale: float, stream: int
    ) -> None:
        """`output`: address and dtype; `shards`: addresses of `count` elements of `dtype` each."""
        table = (ctypes.c_void_p * len(shards))(*shards)
        self._check(
            self._library.holmes_cuda_sum_shards(
                ctypes.c_void_p(output[0]),
                ctypes.c_uint8(DTYPES[output[1]]),
                table,
                ctypes.c_size_t(len(shards)),
                ctypes.c_uint8(DTYPES[dtype]),
                ctypes.c_size_t(count),
                ctypes.c_float(scale),
                ctypes.c_void_p(stream),
            )
        )

    def squared_norm(
        self, result: int, workspace: int, tensors: Sequence[tuple[int, int, float]], dtype: str, stream: int
    ) -> None:
        """`tensors`: address, count and weight of each; `result` and `workspace`: addresses of float64 memory."""
        table = (_NormTensor * len(tensors))(*itertools.starmap(_NormTensor, tensors))
        self._check(
            self._library.holmes_cuda_squared_norm(
                ctypes.c_void_p(result),
                ctypes.c_void_p(workspace),
                table,
                ctypes.c_size_t(len(tensors)),
                ctypes.c_uint8(DTYPES[dtype]),
                ctypes.c_void_p(stream),
            )
        )

    def _check(self, code: int) -> None:
        if code != 0:
            reason = self._library.holmes_cuda_last_error().decode()
            raise SystemError(f"a CUDA kernel cannot be started: {reason}")


@functools.cache
def load() -> Kernels | None:
    """The kernels; None where the build had no nvcc. Local."""
    return Kernels(str(_LIBRARY)) if _LIBRARY.exists() else None
