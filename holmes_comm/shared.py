"""Arrays in memory that the other ranks of a host read where it is."""

from __future__ import annotations

import contextlib
import math
import operator
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from holmes_comm import _C, c10d_module
from holmes_comm.errors import HolmesError, SystemError, UsageError

__all__ = ["empty", "shared_tensors"]

_asked: list[int] = []  # min_bytes of the blocks that are open, in any thread
_asked_lock = threading.Lock()


def empty(shape: int | Sequence[int], dtype: Any) -> Any:
    """A new array of zeros in shared memory: a torch tensor where `dtype` is torch's, else a numpy array. Local.

    Operations between ranks of one host read such arrays in place, where ordinary memory is copied twice or by system
    calls: worth it from some MiB on (docs/algorithms.md has figures). The results are the same. It takes one file
    descriptor and whole pages, so make few large ones and take parts of them (`reshape`, slices, `view`). The memory is
    given back with the last array that shares it. In a forked child it is the child's own once it is written there, and
    shows what the parent writes until then. Where the system gives no shared memory or descriptor the array is in
    ordinary memory.

    Raises UsageError for a shape or dtype that is none, SystemError where there is no memory of either kind.
    """
    sizes = _sizes(shape)
    try:
        return _array(sizes, dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, HolmesError):
            raise
        raise UsageError(f"empty: no array of shape {shape!r} and dtype {dtype!r} can be made: {error}") from error


@contextlib.contextmanager
def shared_tensors(min_bytes: int = 1 << 20) -> Iterator[None]:
    """In this block torch makes tensors on the processor of `min_bytes` bytes and more in memory as `empty`'s. Local.

    Those of all threads, whoever makes them: parameters, gradients, buckets. DDP makes its buckets when it wraps the
    model, and anew after the first backward, so a block around both has its all_reduce read them in place::

        with holmes_comm.shared_tensors():
            model = DistributedDataParallel(model)
            train_one_step(model)

    They stay there after the block. Each takes a file descriptor while it lives, of all that the process may open at
    most half; where the system gives no more, tensors are in ordinary memory. To make one takes longer than there, so
    leave the block when the model is made. In a forked child (a DataLoader's worker) they are the child's own once it
    writes them, and show what the parent writes until then. Of blocks in blocks the least `min_bytes` counts.

    Raises UsageError for a `min_bytes` that is no whole number of at least 1, without torch or a backend for it, and
    beside another library's allocator of CPU memory.
    """
    try:
        least = operator.index(min_bytes)
    except TypeError:
        least = 0
    if least < 1 or isinstance(min_bytes, bool):
        raise UsageError(
            f"shared_tensors: min_bytes={min_bytes!r} is no whole number of at least 1; 1 << 20 is the default"
        )
    if "torch" not in sys.modules:
        raise UsageError("shared_tensors: torch is not imported, so it makes no tensors; import torch before")
    share_from = c10d_module.load().share_tensors_from
    with _asked_lock:
        share_from(min([least, *_asked]))
        _asked.append(least)
    try:
        yield
    finally:
        with _asked_lock:
            _asked.remove(least)
            share_from(min(_asked, default=0))


def _array(sizes: tuple[int, ...], dtype: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        if dtype in (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4):
            raise UsageError(
                f"empty: dtype {dtype} is quantized, and memory alone has no scales; give that of its integers, "
                "torch.uint8 say"
            )
        count, item_bytes = math.prod(sizes), torch.empty(0, dtype=dtype).element_size()
        if count == 0:
            return torch.empty(sizes, dtype=dtype)
        return torch.frombuffer(_memory(count * item_bytes), dtype=dtype).reshape(sizes)

    import numpy as np

    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise UsageError(
            f"empty: dtype {dtype!r} is none of numpy's or torch's; give one, numpy.float32 say"
        ) from error
    if kind.hasobject or kind.subdtype or kind.names or kind.kind in "SUMm" or dtype is None:
        raise UsageError(
            f"empty: dtype {dtype!r} cannot be shared between processes; give one of numbers, numpy.float32 say"
        )
    if math.prod(sizes) * kind.itemsize == 0:
        return np.empty(sizes, dtype=kind)
    return np.frombuffer(_memory(math.prod(sizes) * kind.itemsize), dtype=kind).reshape(sizes)


def _memory(size_bytes: int) -> Any:
    """Zeros that can be written, shared where the system gives that."""
    try:
        return _C.SharedBuffer(size_bytes)
    except SystemError as no_segment:
        try:
            return bytearray(size_bytes)
        except MemoryError:
            raise no_segment from None


def _sizes(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        if isinstance(shape, (Set, Mapping, str, bytes, bytearray)):
            raise TypeError("it has no order of whole numbers")
        sizes = tuple(operator.index(size) for size in ([shape] if hasattr(shape, "__index__") else shape))
    except TypeError as error:
        raise UsageError(f"empty: shape {shape!r} is none; give a whole number or a sequence of them") from error
    if any(size < 0 for size in sizes):
        raise UsageError(f"empty: shape {shape!r} has a negative size; give sizes of 0 or more")
    if math.prod(sizes) > sys.maxsize // 64:
        raise UsageError(f"empty: shape {shape!r} has more elements than any memory; give smaller sizes")
    return sizes
