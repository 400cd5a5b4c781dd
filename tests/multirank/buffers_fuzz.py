"""A fuzz of communicators against numpy: random operations, buffers, splits, aliases, lifetimes and orders of waiting.

    python tests/multirank/buffers_fuzz.py --minutes 60 --seed 1            # --wide: of wide groups

A case is all that its seed says, and stands alone: a few ranks (threads), a transport, some operations in blocks, whose
works are waited for in random order. What every rank's buffers must hold afterwards, inputs and the bytes around them
included, is computed from the seed. A failing case prints the command that runs it again.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from ranks import run_threads

import holmes_comm

try:
    import torch
except ImportError:
    torch = None

_names = itertools.count()
_GUARD_BYTES = 64
_GUARD = 0xA5
_TIMEOUT_S = 60.0

INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]
FLOATS = ["float64", "float32", "float16"]
DTYPES = [*INTEGERS, *FLOATS, "bool", *(["bfloat16"] if torch else [])]


# --- elements ---
class DType(NamedTuple):
    """An element type: how numpy stores it, and what a value is worth."""

    name: str

    @property
    def stored(self) -> np.dtype:
        return np.dtype("uint16" if self.name == "bfloat16" else self.name)

    @property
    def is_float(self) -> bool:
        return "float" in self.name

    @property
    def epsilon(self) -> float:
        return 2.0**-7 if self.name == "bfloat16" else float(np.finfo(self.name).eps)

    def values(self, stored: np.ndarray) -> np.ndarray:
        """In a type that computes: float64 for all floats, else as stored."""
        if self.name == "bfloat16":
            return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return stored.astype(np.float64) if self.is_float else stored

    def make(self, rng: np.random.Generator, count: int) -> np.ndarray:
        if self.name == "bool":
            return rng.integers(0, 2, count).astype(bool)
        if self.name == "bfloat16":
            return (rng.uniform(-2, 2, count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        if self.is_float:
            return rng.uniform(-2, 2, count).astype(self.name)
        return rng.integers(np.iinfo(self.name).min, np.iinfo(self.name).max, count, self.name, endpoint=True)


REDUCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "sum": np.add,
    "avg": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def reductions_of(dtype: DType) -> list[str]:
    return [op for op in REDUCTIONS if (op[0] != "b" if dtype.is_float else op != "avg")]


def reduced(dtype: DType, op: str, parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray | float]:
    """What the parts (stored) reduce to, as values, and how far off a right result may be."""
    values = [dtype.values(part) for part in parts]
    with np.errstate(over="ignore"):
        result = functools.reduce(REDUCTIONS[op], values)
    if not dtype.is_float or op in ("min", "max"):
        return result, 0.0
    size = len(parts)
    if op == "product":
        return result, 2 * size * dtype.epsilon * np.abs(result) + 1e-7
    largest = sum(np.abs(value) for value in values)
    return (result / size if op == "avg" else result), 2 * size * dtype.epsilon * largest + 1e-12


# --- memory ---
class Block:
    """An array between guard bytes, and what it must hold in the end."""

    def __init__(self, dtype: DType, content: np.ndarray, shift: int = 0) -> None:
        start, nbytes = _GUARD_BYTES + shift, content.nbytes
        self.dtype = dtype
        self.raw = np.full(nbytes + 2 * _GUARD_BYTES + shift, _GUARD, np.uint8)
        self.inside = slice(start, start + nbytes)
        self.array = self.raw[self.inside].view(content.dtype)
        self.array[:] = content
        self.expected = dtype.values(content).copy()
        self.tolerance: np.ndarray | float = 0.0

    def expect(self, at: slice, values: np.ndarray, tolerance: np.ndarray | float = 0.0) -> None:
        self.expected[at] = values
        if np.ndim(self.tolerance) == 0:
            self.tolerance = np.zeros(self.expected.shape)
        self.tolerance[at] = tolerance

    def check(self, what: str) -> None:
        for guard in (self.raw[: self.inside.start], self.raw[self.inside.stop :]):
            assert (guard == _GUARD).all(), f"{what}: bytes beside the buffer were written"
        found = self.dtype.values(self.array)
        is_right = np.abs(found - self.expected) <= self.tolerance if self.dtype.is_float else found == self.expected
        wrong = ~is_right
        if wrong.any():
            first = int(np.argmax(wrong))
            raise AssertionError(
                f"{what}: {int(wrong.sum())} of {wrong.size} {self.dtype.name} differ, the first at {first}: "
                f"{found[first]} instead of {self.expected[first]}"
            )


class Export:
    """Only DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


def presented(rng: random.Random, dtype: DType, array: np.ndarray, *, has_rows: bool = False) -> Any:
    """The same memory as one of the objects that a caller may pass; with `has_rows` of the same first dimension."""
    if dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    kinds = ["array", "array", "memoryview", *([] if has_rows else ["rows"])]
    if array.flags.aligned:
        kinds += [*([] if has_rows else ["export"]), *(["tensor", "parameter"] if torch else [])]
    kind = rng.choice(kinds)
    if kind == "rows":
        return array.reshape(-1, 1) if array.size % 2 else array.reshape(2, -1)
    if kind == "memoryview":
        return memoryview(array)
    if kind == "export":
        return Export(array)
    if kind == "tensor":
        return torch.from_numpy(array)
    if kind == "parameter":
        return torch.nn.Parameter(torch.from_numpy(array), requires_grad=False)
    return array


# --- operations ---
class Prepared(NamedTuple):
    """One rank's part of an operation."""

    call: Callable[[Any, bool], Any]  # (communicator, async_op) -> Work, Works or None
    blocks: list[Block]


class Step:
    """One operation as rank `rank` of `size` sees it. `rng` is alike on all ranks, `own` is this rank's."""

    def __init__(self, seed: str, rank: int, size: int) -> None:
        self.seed, self.rank, self.size = seed, rank, size
        self.rng = random.Random(seed)
        self.own = random.Random(f"{seed}/{rank}")
        self.dtype = DType(self.rng.choice(DTYPES))
        self.root = self.rng.randrange(size)
        self.op = self.rng.choice(reductions_of(self.dtype))
        self.kind = self.rng.choice(list(OPERATIONS))

    def count(self) -> int:
        """Alike on all ranks: nothing, one, odd, some, many."""
        kind = self.rng.random()
        if kind < 0.08:
            return 0
        if kind < 0.2:
            return 1
        if kind < 0.8:
            return self.rng.randrange(1, 200)
        if kind < 0.97:
            return self.rng.randrange(200, 20_000)
        return self.rng.randrange(20_000, 300_000)

    def counts(self) -> list[int]:
        """One per rank: equal, or any."""
        if self.rng.random() < 0.5:
            return [self.count()] * self.size
        return [self.count() if self.rng.random() < 0.8 else 0 for _ in range(self.size)]

    def data(self, rank: int, part: int, count: int) -> np.ndarray:
        """What rank `rank` has as its part `part`."""
        entropy = [*self.seed.encode(), rank, part]
        return self.dtype.make(np.random.default_rng(entropy), count)

    def block(self, *parts: np.ndarray) -> Block:
        shift = self.own.randrange(1, 8) if self.own.random() < 0.1 and self.dtype.name != "bfloat16" else 0
        return Block(self.dtype, np.concatenate([np.empty(0, self.dtype.stored), *parts]), shift)

    def blank(self, *counts: int) -> Block:
        return self.block(*[self.data(self.rank, 900 + i, count) for i, count in enumerate(counts)])

    def show(self, array: np.ndarray, *, has_rows: bool = False) -> Any:
        return presented(self.own, self.dtype, array, has_rows=has_rows)

    def prepare(self) -> Prepared:
        return OPERATIONS[self.kind](self)


class Parts(NamedTuple):
    """One buffer per rank, in one block or one each."""

    blocks: list[Block]
    where: list[tuple[Block, slice]]  # by rank

    def array(self, rank: int) -> np.ndarray:
        block, at = self.where[rank]
        return block.array[at]

    def expect(self, rank: int, values: np.ndarray, tolerance: np.ndarray | float = 0.0) -> None:
        block, at = self.where[rank]
        block.expect(at, values, tolerance)


def parts_of(step: Step, contents: list[np.ndarray]) -> Parts:
    if step.own.random() < 0.5:
        blocks = [step.block(content) for content in contents]
        return Parts(blocks, [(block, slice(None)) for block in blocks])
    whole = step.block(*contents)
    ends = np.cumsum([0, *[content.size for content in contents]])
    return Parts([whole], [(whole, slice(ends[i], ends[i + 1])) for i in range(len(contents))])


def shown(step: Step, parts: Parts, *, even: bool) -> Any:
    """As one buffer, where it is one that is cut evenly, or as a list."""
    if even and len(parts.blocks) == 1 and step.own.random() < 0.7:
        return step.show(parts.blocks[0].array)
    return [step.show(parts.array(rank)) for rank in range(step.size)]


def is_even(counts: list[int]) -> bool:
    return len(set(counts)) == 1


def all_reduce(step: Step) -> Prepared:
    count = step.count()
    block = step.block(step.data(step.rank, 0, count))
    block.expect(slice(None), *reduced(step.dtype, step.op, [step.data(r, 0, count) for r in range(step.size)]))
    data, op = step.show(block.array), step.op
    return Prepared(lambda comm, is_async: comm.all_reduce(data, op, async_op=is_async), [block])


def reduce(step: Step) -> Prepared:
    count, root, op = step.count(), step.root, step.op
    block = step.block(step.data(step.rank, 0, count))
    if step.rank == root:
        block.expect(slice(None), *reduced(step.dtype, op, [step.data(r, 0, count) for r in range(step.size)]))
    data = step.show(block.array)
    return Prepared(lambda comm, is_async: comm.reduce(data, root, op, async_op=is_async), [block])


def broadcast(step: Step) -> Prepared:
    count, root = step.count(), step.root
    block = step.block(step.data(step.rank, 0, count))
    block.expect(slice(None), step.dtype.values(step.data(root, 0, count)))
    data = step.show(block.array)
    return Prepared(lambda comm, is_async: comm.broadcast(data, root, async_op=is_async), [block])


def reduce_scatter(step: Step) -> Prepared:
    counts, op, me = step.counts(), step.op, step.rank
    if step.rng.random() < 0.15:  # the same buffer for every rank
        counts = [counts[0]] * step.size
        block = step.block(step.data(me, 0, counts[0]))
        inputs = Parts([block], [(block, slice(None))] * step.size)
        source: Any = [step.show(block.array) for _ in range(step.size)]
        part = 0
    else:
        inputs = parts_of(step, [step.data(me, r, count) for r, count in enumerate(counts)])
        source = shown(step, inputs, even=is_even(counts))
        part = me
    result = reduced(step.dtype, op, [step.data(r, part, counts[me]) for r in range(step.size)])
    if step.own.random() < 0.3 and len(set(map(id, inputs.where))) == step.size and part == me:  # in place
        inputs.expect(me, *result)
        output, blocks = inputs.array(me), inputs.blocks
    else:
        block = step.blank(counts[me])
        block.expect(slice(None), *result)
        output, blocks = block.array, [*inputs.blocks, block]
    target = step.show(output)
    return Prepared(lambda comm, is_async: comm.reduce_scatter(target, source, op, async_op=is_async), blocks)


def gathered(step: Step, counts: list[int]) -> tuple[Parts, Any, list[Block]]:
    """Outputs that get every rank's part 0, this rank's input (perhaps in place), and their blocks."""
    me = step.rank
    contents = [step.data(me, 900 + r, count) for r, count in enumerate(counts)]
    is_in_place = step.own.random() < 0.3
    if is_in_place:
        contents[me] = step.data(me, 0, counts[me])
    outputs = parts_of(step, contents)
    for r, count in enumerate(counts):
        outputs.expect(r, step.dtype.values(step.data(r, 0, count)))
    if is_in_place:
        return outputs, step.show(outputs.array(me)), outputs.blocks
    block = step.block(step.data(me, 0, counts[me]))
    return outputs, step.show(block.array), [*outputs.blocks, block]


def all_gather(step: Step) -> Prepared:
    counts = step.counts()
    outputs, source, blocks = gathered(step, counts)
    target = shown(step, outputs, even=is_even(counts))
    return Prepared(lambda comm, is_async: comm.all_gather(target, source, async_op=is_async), blocks)


def gather(step: Step) -> Prepared:
    counts, root = step.counts(), step.root
    if step.rank != root:
        block = step.block(step.data(step.rank, 0, counts[step.rank]))
        source = step.show(block.array)
        return Prepared(lambda comm, is_async: comm.gather(source, None, root, async_op=is_async), [block])
    outputs, source, blocks = gathered(step, counts)
    target = shown(step, outputs, even=is_even(counts))
    return Prepared(lambda comm, is_async: comm.gather(source, target, root, async_op=is_async), blocks)


def scatter(step: Step) -> Prepared:
    counts, root, me = step.counts(), step.root, step.rank
    values = step.dtype.values(step.data(root, me, counts[me]))
    blocks: list[Block] = []
    source = None
    output = None
    if me == root:
        inputs = parts_of(step, [step.data(me, r, count) for r, count in enumerate(counts)])
        blocks = [*inputs.blocks]
        source = shown(step, inputs, even=is_even(counts))
        if step.own.random() < 0.3:  # in place
            output = inputs.array(me)
    if output is None:
        block = step.blank(counts[me])
        block.expect(slice(None), values)
        output, blocks = block.array, [*blocks, block]
    target = step.show(output)
    return Prepared(lambda comm, is_async: comm.scatter(target, source, root, async_op=is_async), blocks)


def all_to_all(step: Step) -> Prepared:
    """Lists, even cuts, or split sizes in rows."""
    me, size = step.rank, step.size
    row = step.rng.choice([1, 1, 3])
    table = [step.counts() for _ in range(size)]  # [from][to]
    if step.rng.random() < 0.4:
        table = [[step.rng.randrange(0, 40)] * size] * size
    sends = [step.data(me, r, table[me][r] * row) for r in range(size)]
    inputs = parts_of(step, sends)
    outputs = parts_of(step, [step.data(me, 900 + r, table[r][me] * row) for r in range(size)])
    for r in range(size):
        outputs.expect(r, step.dtype.values(step.data(r, me, table[r][me] * row)))

    def side(parts: Parts, rows: list[int]) -> tuple[Any, list[int] | None]:
        if len(parts.blocks) == 1 and step.own.random() < 0.8 and (sum(rows) > 0 or size == 1):
            if is_even(rows) and step.own.random() < 0.5:
                return step.show(parts.blocks[0].array), None
            return step.show(parts.blocks[0].array.reshape(sum(rows), row), has_rows=True), rows
        return shown(step, parts, even=False), None

    source, source_rows = side(inputs, table[me])
    target, target_rows = side(outputs, [table[r][me] for r in range(size)])

    def call(comm: Any, is_async: bool) -> Any:
        return comm.all_to_all(target, source, target_rows, source_rows, async_op=is_async)

    return Prepared(call, [*inputs.blocks, *outputs.blocks])


def barrier(step: Step) -> Prepared:
    return Prepared(lambda comm, is_async: comm.barrier(async_op=is_async), [])


def message(step: Step) -> Prepared:
    """One send and its receive; the other ranks do nothing."""
    source, tag, count = step.root, step.rng.choice([0, 7, 2**32 - 2]), step.count()
    if step.size == 1:
        return barrier(step)
    to = (source + step.rng.randrange(1, step.size)) % step.size
    if step.rank not in (source, to):
        return Prepared(lambda comm, is_async: None, [])
    if step.rank == source:
        block = step.block(step.data(source, 0, count))
        data = step.show(block.array)
        return Prepared(lambda comm, is_async: comm.send(data, to, tag, async_op=is_async), [block])
    block = step.blank(count)
    block.expect(slice(None), step.dtype.values(step.data(source, 0, count)))
    target = step.show(block.array)
    return Prepared(lambda comm, is_async: works_of(comm.recv(target, source, tag, async_op=is_async)), [block])


def works_of(result: Any) -> Any:
    """A receive that is done returns its source."""
    return None if isinstance(result, int) else result


def any_message(step: Step) -> Prepared:
    """Every other rank sends to the root, which takes them as they come. Its tag is the step's own."""
    tag, count, root = 100 + step.rng.randrange(2**31), step.count(), step.root
    if step.rank != root:
        block = step.block(step.data(step.rank, 0, count))
        data = step.show(block.array)
        return Prepared(lambda comm, is_async: comm.send(data, root, tag, async_op=is_async), [block])
    blocks = [step.blank(count) for _ in range(step.size - 1)]
    targets = [step.show(block.array) for block in blocks]

    def call(comm: Any, is_async: bool) -> None:
        works = [comm.recv(target, None, tag, async_op=True) for target in targets]
        seen = set()
        for work, block in zip(works, blocks, strict=True):
            work.wait()
            seen.add(work.source_rank)
            block.expect(slice(None), step.dtype.values(step.data(work.source_rank, 0, count)))
        assert seen == set(range(step.size)) - {root}, f"messages came from {seen}"

    return Prepared(call, blocks)


def ring(step: Step) -> Prepared:
    """A batch: every rank sends to the next, all at once, perhaps several messages of one tag."""
    if step.size == 1:
        return barrier(step)
    to, source = (step.rank + 1) % step.size, (step.rank - 1) % step.size
    calls, blocks = [], []
    for i in range(step.rng.randrange(1, 4)):
        count, tag = step.count(), step.rng.choice([3, 50 + i])
        outgoing, incoming = step.block(step.data(step.rank, i, count)), step.blank(count)
        incoming.expect(slice(None), step.dtype.values(step.data(source, i, count)))
        calls += [("send", step.show(outgoing.array), to, tag), ("recv", step.show(incoming.array), source, tag)]
        blocks += [outgoing, incoming]
    return Prepared(lambda comm, is_async: comm.batch(calls), blocks)


def split(step: Step) -> Prepared:
    """A communicator of some ranks, in another order, and one operation on it."""
    if step.rng.random() < 0.6:  # slow: connections are made
        return all_reduce(step)
    colors = [step.rng.choice([-1, 0, 0, 1]) for _ in range(step.size)]
    keys = [step.rng.randrange(3) for _ in range(step.size)]
    mine = colors[step.rank]
    members = sorted((keys[r], r) for r in range(step.size) if colors[r] == mine)
    blocks: list[Block] = []

    def call(comm: Any, is_async: bool) -> None:
        part = comm.split(mine, keys[step.rank])
        if mine < 0:
            assert part is None
            return
        rank = members.index((keys[step.rank], step.rank))
        assert (part.rank, part.size) == (rank, len(members))
        prepared = all_reduce(Step(f"{step.seed}/split{mine}", rank, len(members)))
        blocks.extend(prepared.blocks)
        work = prepared.call(part, is_async)
        if work is not None:
            work.wait()

    return Prepared(call, blocks)


OPERATIONS: dict[str, Callable[[Step], Prepared]] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "broadcast": broadcast,
    "reduce": reduce,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
    "barrier": barrier,
    "message": message,
    "any_message": any_message,
    "ring": ring,
    "split": split,
}


# --- cases ---
class Case:
    """All that a seed says."""

    def __init__(self, seed: int, *, is_wide: bool = False) -> None:
        rng = random.Random(f"case {seed}")
        self.seed = seed
        self.is_wide = is_wide
        self.size = rng.choice([4, 5, 6, 7, 9, 11] if is_wide else [1, 2, 2, 3, 4, 5])
        self.options: dict[str, Any] = {"transport": rng.choice(["tcp", "shm", "auto"])}
        self.causes: list[str] = []  # what the ranks raised, the first first
        self.blocks = [rng.randrange(1, 8) for _ in range(rng.randrange(1, 4))]
        if self.size > 2 and not is_wide and rng.random() < 0.4:
            self.clusters = [rng.choice("ab") for _ in range(self.size)]
            self.min_bytes = rng.choice([1, 4096, "never"])
        else:
            self.clusters = []

    def __str__(self) -> str:
        over = f", clusters {''.join(self.clusters)} from {self.min_bytes} bytes" if self.clusters else ""
        wide = ", wide" if self.is_wide else ""
        return f"{self.size} ranks{wide}, {self.options['transport']}{over}, blocks of {self.blocks} operations"

    def run(self) -> None:
        store, name = holmes_comm.LocalStore(), f"fuzz{next(_names)}"
        run_threads(self.size, lambda rank: self.run_rank(store, name, rank), timeout_s=3 * _TIMEOUT_S)

    def run_rank(self, store: Any, name: str, rank: int) -> None:
        options = dict(self.options)
        if self.clusters:
            options |= {"cluster": self.clusters[rank], "hierarchical_min_bytes": self.min_bytes}
        if self.is_wide:
            options["options"] = holmes_comm.CommunicatorOptions(wide_min_ranks=4)
        comm = holmes_comm.init(
            store, rank, self.size, name=name, timeout_s=_TIMEOUT_S, connect_timeout_s=_TIMEOUT_S, **options
        )
        try:
            for number, operations in enumerate(self.blocks):
                self.run_block(comm, number, operations)
            comm.barrier()
        except Exception as error:
            self.causes.append("".join(traceback.format_exception(error)))
            comm.abort(f"rank {rank} of the fuzz failed")  # the others do not wait for it
            raise

    def run_block(self, comm: Any, number: int, operations: int) -> None:
        own = random.Random(f"{self.seed}/{number}/{comm.rank}")
        pending: list[tuple[Any, str, list[Block]]] = []
        is_bulk = own.random() < 0.5
        for i in range(operations):
            step = Step(f"{self.seed}/{number}/{i}", comm.rank, comm.size)
            if self.is_wide and step.kind == "any_message":  # refused there
                continue
            what = f"rank {comm.rank}, block {number}, operation {i}: {step.kind}"
            prepared = step.prepare()
            is_async = is_bulk or own.random() < 0.3
            try:
                result = prepared.call(comm, is_async)
            except Exception as error:
                raise AssertionError(f"{what} raised {type(error).__name__}: {error}") from error
            blocks = [] if own.random() < 0.15 else prepared.blocks  # nobody holds or looks at them
            works = result if isinstance(result, list) else [] if result is None else [result]
            del prepared, step, result
            if not works:
                for block in blocks:
                    block.check(what)
            else:
                pending += [(work, what, []) for work in works[:-1]] + [(works[-1], what, blocks)]
        if own.random() < 0.2:
            gc.collect()
        self.finish(own, pending)

    def finish(self, own: random.Random, pending: list[tuple[Any, str, list[Block]]]) -> None:
        """Waits in any order, sometimes in another thread; a work may also be dropped, which waits for nothing."""
        order = list(pending)
        own.shuffle(order)
        for work, _, _ in order:
            if own.random() < 0.1:
                run_threads(1, lambda _, work=work: work.wait(), timeout_s=_TIMEOUT_S)
            else:
                work.wait()
            assert work.is_completed()
        for _, what, blocks in pending:
            for block in blocks:
                block.check(what)


class Failure(NamedTuple):
    seed: int
    text: str
    is_wide: bool = False

    def __str__(self) -> str:
        wide = " --wide" if self.is_wide else ""
        return f"{self.text}\nagain: python tests/multirank/buffers_fuzz.py --seed {self.seed} --cases 1{wide}"


def run_case(seed: int, *, is_wide: bool = False) -> Failure | None:
    case = Case(seed, is_wide=is_wide)
    try:
        case.run()
    except Exception:
        causes = [*case.causes, traceback.format_exc()]
        return Failure(seed, f"{causes[0]}seed {seed}: {case}", is_wide)
    return None


def run(first_seed: int, *, seconds: float, cases: int, is_wide: bool = False) -> tuple[int, Failure | None]:
    """Cases from `first_seed` on until time or number is spent, or one fails: how many ran, and the one that failed."""
    end = time.monotonic() + seconds
    for number in range(cases):
        if time.monotonic() > end:
            return number, None
        if failure := run_case(first_seed + number, is_wide=is_wide):
            return number + 1, failure
    return cases, None


def main() -> int:
    parser = argparse.ArgumentParser(description="Communicators against numpy, by seed.")
    parser.add_argument("--minutes", type=float, default=1.0, help="when to stop (default 1)")
    parser.add_argument("--seed", type=int, default=1, help="of the first case; the next has the next (default 1)")
    parser.add_argument("--cases", type=int, default=10_000_000, help="how many at most")
    parser.add_argument("--wide", action="store_true", help="groups of rows and columns, of 4 ranks or more")
    arguments = parser.parse_args()
    start = time.monotonic()
    done, failure = run(arguments.seed, seconds=60 * arguments.minutes, cases=arguments.cases, is_wide=arguments.wide)
    print(f"{done} cases from seed {arguments.seed} on in {time.monotonic() - start:.0f} s", flush=True)
    if failure:
        print(failure, file=sys.stderr, flush=True)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
