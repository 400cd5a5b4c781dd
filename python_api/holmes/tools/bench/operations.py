"""What is measured: each operation's buffers, its expected result in numpy and its bus-bandwidth factor."""

from __future__ import annotations

import contextlib
import itertools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holmes_comm.errors import UsageError

Array = NDArray[Any]

#: Messages of a batch.
BATCH = 8

# Inputs repeat after this many elements: a prime, so that no chunk, slice or rank boundary falls together with it.
_PERIOD = 1009
_HUGE_PAGE_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class DType:
    """An element type as numpy holds it; bfloat16 is kept as the bits of its 16 high bits."""

    name: str
    storage: type[np.generic]
    kind: str  # "float", "integer" or "bool"
    epsilon: float = 0.0  # relative rounding step of a float

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return np.dtype(self.storage).itemsize

    @property
    def torch_only(self) -> bool:
        """Whether plain numpy has no such type, so that buffers travel as torch tensors."""
        return self.name == "bfloat16"

    def encode(self, values: Array) -> Array:
        """Returns `values` (any numeric type) in storage form."""
        if self.name == "bfloat16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(self.storage)

    def decode(self, stored: Array) -> Array:
        """Returns storage as numbers that can be compared: float64 or int64."""
        if self.name == "bfloat16":
            return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return stored.astype(np.float64 if self.kind == "float" else np.int64)

    def check_reduction(self, op: str) -> None:
        """Raises ValueError where `op` is not defined for this type."""
        if op == "avg" and self.kind != "float":
            raise UsageError(f"avg of {self.name} is not defined; take a floating-point type, or sum")
        if op in ("band", "bor", "bxor") and self.kind == "float":
            raise UsageError(f"{op} of {self.name} is not defined; take an integer type or bool")


DTYPES = {
    dtype.name: dtype
    for dtype in [
        DType("float64", np.float64, "float", 2.0**-52),
        DType("float32", np.float32, "float", 2.0**-23),
        DType("float16", np.float16, "float", 2.0**-10),
        DType("bfloat16", np.uint16, "float", 2.0**-7),
        DType("int8", np.int8, "integer"),
        DType("int16", np.int16, "integer"),
        DType("int32", np.int32, "integer"),
        DType("int64", np.int64, "integer"),
        DType("uint8", np.uint8, "integer"),
        DType("bool", np.bool_, "bool"),
    ]
}

REDUCTIONS: dict[str, Callable[[Array], Array]] = {
    "sum": lambda stack: stack.sum(axis=0),
    "avg": lambda stack: stack.mean(axis=0),
    "min": lambda stack: stack.min(axis=0),
    "max": lambda stack: stack.max(axis=0),
    "product": lambda stack: stack.prod(axis=0),
    "band": np.bitwise_and.reduce,
    "bor": np.bitwise_or.reduce,
    "bxor": np.bitwise_xor.reduce,
}


@dataclass(frozen=True)
class Operation:
    """One operation. `size` means what it means in nccl-tests: the larger of a rank's buffers.

    send_recv: every rank sends to the next and receives from the one before, at the same time; batch: the same in
    BATCH messages. send: rank 0 sends to rank 1; ping_pong: and then receives as much from it; the other ranks do
    nothing. The forms with a v are uneven: the part of rank r is r + 1 times rank 0's, in all_to_allv what rank r sends
    to rank j is (r + j) % n + 1 times the least.
    """

    name: str
    bus_factor: Callable[[int], float]  # bus bandwidth / algorithm bandwidth for n ranks
    reduces: bool = False
    in_place: bool = False
    input_split: bool = False  # the input is one n-th of the size
    output_split: bool = False  # the output is one n-th of the size
    has_data: bool = True
    at_root: bool = False  # only the root gets the result
    uneven: bool = False
    between: int | None = None  # only ranks below this take part; None: all
    least_ranks: int = 1


OPERATIONS = {
    operation.name: operation
    for operation in [
        Operation("all_reduce", lambda n: 2 * (n - 1) / n, reduces=True, in_place=True),
        Operation("reduce_scatter", lambda n: (n - 1) / n, reduces=True, output_split=True),
        Operation("all_gather", lambda n: (n - 1) / n, input_split=True),
        Operation("all_to_all", lambda n: (n - 1) / n),
        Operation("broadcast", lambda n: 1.0, in_place=True),
        Operation("reduce", lambda n: 1.0, reduces=True, in_place=True, at_root=True),
        Operation("gather", lambda n: (n - 1) / n, input_split=True, at_root=True),
        Operation("scatter", lambda n: (n - 1) / n, output_split=True),
        Operation("all_gatherv", lambda n: (n - 1) / n, input_split=True, uneven=True),
        Operation("all_to_allv", lambda n: (n - 1) / n, uneven=True),
        Operation("gatherv", lambda n: (n - 1) / n, input_split=True, at_root=True, uneven=True),
        Operation("scatterv", lambda n: (n - 1) / n, output_split=True, uneven=True),
        Operation("send", lambda n: 1.0, between=2, least_ranks=2),
        Operation("send_recv", lambda n: 1.0),
        Operation("batch", lambda n: 1.0),
        Operation("ping_pong", lambda n: 2.0, between=2, least_ranks=2),
        Operation("barrier", lambda n: 1.0, has_data=False),
    ]
}


def cut(whole: Any, counts: Sequence[int]) -> list[Any]:
    """Returns consecutive parts, of these lengths, of an array or tensor; they share its memory."""
    ends = list(itertools.accumulate(counts))
    return [whole[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _pattern(dtype: DType, op: str, rank: int) -> Array:
    """Returns one period of a rank's input: small integers, so that every reduction is exact in every type."""
    # Sums stay below 256 up to 64 ranks; products are powers of two.
    high = 2 if dtype.kind == "bool" else 3 if op == "product" else 4
    low = 0 if dtype.kind == "bool" else 1
    return np.random.default_rng(rank).integers(low, high, _PERIOD)


def _stretch(period: Array, offset: int, count: int) -> Array:
    """Returns elements [offset, offset + count) of the endless repetition of `period`."""
    return np.resize(np.roll(period, -offset % _PERIOD), count)


def _placed(array: Array) -> Array:
    """Returns the same in memory of its own, which begins on a huge page where that is worth one.

    Where in its pages an array begins differs from one process to the next, and with it which part of it huge pages
    hold: copies of MiB then take up to twice as long, whichever library makes them.
    """
    if array.nbytes < _HUGE_PAGE_BYTES // 2:
        return array
    pages = -(-array.nbytes // _HUGE_PAGE_BYTES) + 1
    memory = mmap.mmap(-1, pages * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    room = np.frombuffer(memory, np.uint8)
    begin = -room.ctypes.data % _HUGE_PAGE_BYTES
    placed = room[begin : begin + array.nbytes].view(array.dtype)
    placed[:] = array
    return placed


@dataclass(frozen=True)
class Case:
    """One operation on one size and type, seen from one rank. The root of rooted operations is rank 0."""

    operation: Operation
    bytes: int  # asked for; `size_bytes` is what is moved
    dtype: DType
    op: str
    rank: int
    ranks: int

    @property
    def count(self) -> int:
        """Elements of the larger buffer: at least one for each rank, a multiple of the ranks where it is split."""
        if not self.operation.has_data:
            return 0
        if self.operation.in_place or self.operation.name in ("send", "send_recv", "batch", "ping_pong"):
            return max(self.bytes // self.dtype.size_bytes, 1)
        return sum(self.parts())

    def parts(self) -> list[int]:
        """Returns the elements of each rank's part of the larger buffer."""
        if self.operation.uneven:
            first = self.rank if self.operation.name == "all_to_allv" else 0
            shares = [(first + rank) % self.ranks + 1 for rank in range(self.ranks)]
        else:
            shares = [1] * self.ranks
        least = max(self.bytes // self.dtype.size_bytes // sum(shares), 1)
        return [least * share for share in shares]

    def pieces(self) -> list[int]:
        """Returns the elements of each message of a batch, all of at least one."""
        return [len(piece) for piece in np.array_split(np.empty(self.count), BATCH) if len(piece)]

    @property
    def size_bytes(self) -> int:
        """Bytes of the larger buffer: what the bandwidths are computed from."""
        return self.count * self.dtype.size_bytes

    def make_buffers(self) -> tuple[Array, Array]:
        """Returns (input, output), 1-D and filled; the same array twice for an operation in place."""
        part = self.parts()[self.rank]
        period = self.dtype.encode(_pattern(self.dtype, self.op, self.rank))
        source = _placed(_stretch(period, 0, part if self.operation.input_split else self.count))
        if self.operation.in_place:
            return source, source
        return source, _placed(np.zeros(part if self.operation.output_split else self.count, source.dtype))

    def wrong_elements(self, output: Array) -> int:
        """Returns how many elements of `output` differ from what numpy computes."""
        if not self.operation.has_data or (self.operation.at_root and self.rank != 0):
            return 0  # nothing to compare: libraries may use the other ranks' buffers of a reduce
        if self.operation.between is not None and self.rank >= self.operation.between:
            return 0
        if self.operation.name == "send" and self.rank == 0:
            return 0
        expected = self._expected()
        # Everything but an average is exact.
        if self.op == "avg" and self.operation.reduces:
            got = self.dtype.decode(output)
            return int(np.count_nonzero(~np.isclose(got, self.dtype.decode(expected), rtol=self.dtype.epsilon, atol=0)))
        return int(np.count_nonzero(output != expected))

    def _expected(self) -> Array:
        parts = self.parts()
        offset, part = sum(parts[: self.rank]), parts[self.rank]
        periods = [_pattern(self.dtype, self.op, rank) for rank in range(self.ranks)]
        name = self.operation.name
        if self.operation.reduces:
            reduced = REDUCTIONS[self.op](np.stack(periods))
            return _stretch(
                self.dtype.encode(reduced), *((offset, part) if self.operation.output_split else (0, self.count))
            )
        encoded = [self.dtype.encode(period) for period in periods]
        if name == "broadcast":
            return _stretch(encoded[0], 0, self.count)
        if name in ("scatter", "scatterv"):
            return _stretch(encoded[0], offset, part)
        if name in ("send", "ping_pong"):
            return _stretch(encoded[1 - self.rank], 0, self.count)
        if name in ("send_recv", "batch"):
            return _stretch(encoded[self.rank - 1], 0, self.count)
        if name in ("all_to_all", "all_to_allv"):
            theirs = [replace(self, rank=rank).parts() for rank in range(self.ranks)]
            places = [(sum(each[: self.rank]), each[self.rank]) for each in theirs]
        else:
            places = [(0, part) for part in parts]
        return np.concatenate([_stretch(period, *place) for period, place in zip(encoded, places, strict=True)])
