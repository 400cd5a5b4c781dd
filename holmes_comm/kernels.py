"""What gradients need beside communication, on many tensors at once: buckets packed and unpacked with cast and scale,
16-bit shards summed in float32, the norm with its check for what is not finite.

torch, cupy and numpy arrays, contiguous. In a GPU's memory one CUDA kernel does it for all tensors, where the build had
nvcc and the data types are float32, float16 or bfloat16; else the library's own operations do, with the same results
(`squared_norm` to rounding). Work is queued on the library's current stream; nothing waits for it. Everything is local.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from holmes_comm import cuda_kernels
from holmes_comm.array_library import ArrayLibrary, library_of
from holmes_comm.errors import UsageError

__all__ = ["Table", "accumulate", "implementation", "pack", "squared_norm", "sum_shards", "unpack"]

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_MOST_SHARDS = 256  # of one kernel


def pack(bucket: Any, tensors: Sequence[Any], offsets: Sequence[int] | None = None, *, scale: float = 1.0) -> None:
    """bucket[offset : offset + numel] = tensor * scale for each tensor, rounded to the bucket's dtype.

    Args:
        bucket: one array, on the tensors' device.
        tensors: of any shapes and of one floating dtype.
        offsets: where each begins in the bucket, in elements; None: one after the other.
        scale: applied in float32.

    Raises UsageError where a tensor ends beyond the bucket, or arrays differ in library, device or kind.
    """
    if tensors:
        Table(bucket, tensors, offsets, what="pack").pack(scale=scale)


def unpack(bucket: Any, tensors: Sequence[Any], offsets: Sequence[int] | None = None, *, scale: float = 1.0) -> None:
    """tensor = bucket[offset : offset + numel] * scale for each tensor, in the manner of `pack`."""
    if tensors:
        Table(bucket, tensors, offsets, what="unpack").unpack(scale=scale)


def accumulate(
    bucket: Any, tensors: Sequence[Any], offsets: Sequence[int] | None = None, *, scale: float = 1.0
) -> None:
    """bucket[offset : offset + numel] += tensor * scale for each tensor, in the manner of `pack`, into float32.

    Sums of 16-bit gradients lose nothing there that 16 bits would round off.
    """
    _check_sums(library_of(bucket).dtype_of(bucket))
    if tensors:
        Table(bucket, tensors, offsets, what="accumulate").accumulate(scale=scale)


class Table:
    """A bucket and the tensors that have places in it, prepared once for many calls: each is then one of the library's,
    whose host time does not grow with the tensors that Python looks at.

    The arguments are those of `pack`; there is one tensor at least. The arrays are held, and must keep their memory:
    what replaces it (`tensor.data = ...`) needs a new table.
    """

    def __init__(
        self, bucket: Any, tensors: Sequence[Any], offsets: Sequence[int] | None = None, *, what: str = "Table"
    ) -> None:
        if not tensors:
            raise UsageError(f"{what}: no tensors; give one at least")
        self._library, self._bucket, self._tensors = _prepare(what, bucket, tensors)
        counts = [_count(tensor) for tensor in self._tensors]
        self._offsets = [0, *itertools.accumulate(counts[:-1])] if offsets is None else list(offsets)
        if len(self._offsets) != len(counts):
            raise UsageError(f"{what}: {len(self._offsets)} offsets for {len(counts)} tensors; give one for each")
        size = _count(self._bucket)
        for number, (offset, count) in enumerate(zip(self._offsets, counts, strict=True)):
            if offset < 0 or offset + count > size:
                raise UsageError(
                    f"{what}: tensor {number} (offset {offset}, {count} elements) ends beyond the bucket of {size} "
                    "elements"
                )
        self._dtype, dtype = self._library.dtype_of(bucket), self._library.dtype_of(tensors[0])
        self._kernels = _kernels(self._library, bucket, (self._dtype, dtype))
        if self._kernels is not None:
            addresses = [self._library.address(tensor) for tensor in self._tensors]
            self._table = self._kernels.move_table(
                (self._library.address(self._bucket), size, self._dtype),
                list(zip(addresses, counts, self._offsets, strict=True)),
                dtype,
            )

    def pack(self, *, scale: float = 1.0) -> None:
        """As the function of that name."""
        self._move("pack", scale)

    def unpack(self, *, scale: float = 1.0) -> None:
        """As the function of that name."""
        self._move("unpack", scale)

    def accumulate(self, *, scale: float = 1.0) -> None:
        """As the function of that name."""
        _check_sums(self._dtype)
        self._move("accumulate", scale)

    def _move(self, kind: str, scale: float) -> None:
        if self._kernels is not None:
            with self._library.on_gpu(self._bucket):
                self._kernels.move(kind, self._table, scale, self._library.stream())
            return
        for tensor, offset in zip(self._tensors, self._offsets, strict=True):
            place = self._bucket[offset : offset + _count(tensor)]
            target, source = (tensor, place) if kind == "unpack" else (place, tensor)
            self._library.move(target, source, scale, adds=kind == "accumulate")


def sum_shards(output: Any, shards: Sequence[Any], *, scale: float = 1.0) -> None:
    """output = scale * the sum of `shards`, summed in float32 in their order and rounded once.

    Shards have one floating dtype and the output's number of elements; the output is none of them.
    """
    if not shards:
        raise UsageError("sum_shards: no shards; give one at least")
    library, flat_output, flat_shards = _prepare("sum_shards", output, shards)
    count = _count(flat_output)
    for number, shard in enumerate(flat_shards):
        if _count(shard) != count:
            raise UsageError(
                f"sum_shards: shard {number} has {_count(shard)} elements, the output {count}; they must be equal"
            )
    dtypes = (library.dtype_of(output), library.dtype_of(shards[0]))
    kernels = _kernels(library, output, dtypes) if len(shards) <= _MOST_SHARDS else None
    if kernels is None:
        library.sum_shards(flat_output, flat_shards, scale)
        return
    addresses = [library.address(shard) for shard in flat_shards]
    with library.on_gpu(output):
        kernels.sum_shards((library.address(output), dtypes[0]), addresses, dtypes[1], count, scale, library.stream())


def squared_norm(tensors: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
    """The sum of weight * (the sum of a tensor's squares), as a float64 scalar of the library on the tensors' device.

    It is not finite exactly where an element of a tensor is not, so it says both: the norm and whether a step may be
    taken. Tensors have one floating dtype; there is one at least. On GPUs the kernel gives the same bits everywhere.
    """
    if not tensors:
        raise UsageError("squared_norm: no tensors; give one at least")
    weights = [1.0] * len(tensors) if weights is None else list(weights)
    if len(weights) != len(tensors):
        raise UsageError(f"squared_norm: {len(weights)} weights for {len(tensors)} tensors; give one for each")
    library, _, flat = _prepare("squared_norm", tensors[0], tensors)
    dtype = library.dtype_of(tensors[0])
    kernels = _kernels(library, tensors[0], (dtype,))
    if kernels is None:
        return library.squared_norm(flat, weights)
    memory = library.empty_float64(1 + kernels.norm_workspace_count, tensors[0])
    table = [(library.address(t), _count(t), weight) for t, weight in zip(flat, weights, strict=True)]
    with library.on_gpu(tensors[0]):
        start = library.address(memory)
        kernels.squared_norm(start, start + 8, table, dtype, library.stream())
    return memory[0]


def implementation(array: Any) -> str:
    """What works on arrays like this one: "CUDA kernels", or the library, "torch operations" for example. Local."""
    library = library_of(array)
    found = _kernels(library, array, (library.dtype_of(array),))
    return f"{library.name} operations" if found is None else "CUDA kernels"


def _check_sums(dtype: str) -> None:
    if dtype not in ("float32", "float64"):
        raise UsageError(f"accumulate: the bucket is {dtype}; it must be float32, in which the sums are kept")


def _prepare(what: str, first: Any, others: Sequence[Any]) -> tuple[ArrayLibrary, Any, list[Any]]:
    """The library, and all arrays flat. Raises UsageError where they do not belong together."""
    library = library_of(first)
    gpu, dtype = library.gpu_of(first), None
    for number, array in enumerate(others):
        if library_of(array) is not library or library.gpu_of(array) != gpu:
            raise UsageError(f"{what}: array {number} is of another library or device than the first; use one for all")
        dtype = dtype or library.dtype_of(array)
        if library.dtype_of(array) != dtype:
            raise UsageError(
                f"{what}: array {number} is {library.dtype_of(array)}, the first {dtype}; make a call for each dtype"
            )
    for name in (library.dtype_of(first), dtype):
        if name not in _FLOATS:
            raise UsageError(f"{what}: {name} is no floating dtype; use one of {', '.join(_FLOATS)}")
    return library, library.flat(first), [library.flat(array) for array in others]


def _kernels(library: ArrayLibrary, array: Any, dtypes: Sequence[str]) -> cuda_kernels.Kernels | None:
    if library.gpu_of(array) is None or any(dtype not in cuda_kernels.DTYPES for dtype in dtypes):
        return None
    return cuda_kernels.load()


def _count(array: Any) -> int:
    return int(array.shape[0])
