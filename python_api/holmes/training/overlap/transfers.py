"""Transfers: asynchronous collectives of one group, timed: how long each took, how long the caller stood waiting."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import holmes_comm
from holmes.training.overlap.usage import agree
from holmes.training.process_groups import timeout_of

# torch 2.13 renamed both.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

REDUCE_SCATTER, ALL_GATHER = "reduce-scatter", "all-gather"  # kinds of transfers of buckets


@dataclass
class Transfer:
    """One collective. Times are CLOCK_MONOTONIC seconds; `exposed_s` is what `wait` stood still."""

    kind: str
    bucket: int
    size_bytes: int
    submitted_s: float
    work: dist.Work | None
    ended_s: float | None = None
    waits: list[tuple[float, float]] = field(default_factory=list)

    @property
    def exposed_s(self) -> float:
        """Seconds in which the caller waited for it."""
        return sum(end - start for start, end in self.waits)

    def is_done(self) -> bool:
        """Whether it has ended; never blocks. An error is raised by `wait`."""
        if self.work is not None and self.work.is_completed():
            self.finish()
        return self.work is None

    def wait(self) -> None:
        """As `finish`; the time counts as exposed."""
        if self.work is None:
            return
        if self.work.is_completed():
            self.finish()
            return
        started = time.monotonic()
        self.finish()
        self.waits.append((started, time.monotonic()))

    def finish(self) -> None:
        """Blocks until it has ended. Raises what the group's backend raises."""
        work = self.work
        if work is not None:
            work.wait()
            self.ended_s = _ended_s(work, self.submitted_s)
            self.work = None  # and with it the hold on its buffers


class Lane:
    """A process group's collectives, which run one after another in the order of their start. Not thread-safe.

    `size` is 1, and nothing is sent, where no process group exists or the group has one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, label: str | None = None) -> None:
        self.group = group
        self.size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        if self.rank < 0:
            raise ValueError("this rank is not in the given process group; give the group it belongs to")
        self.label = label or _label(group)
        self.nics = _nics(group) if self.size > 1 else ()
        self.ended: list[Transfer] = []
        self._pending: list[Transfer] = []
        self._averages = self.size > 1 and dist.get_backend(group) in ("holmes", "nccl")
        self._codecs: dict[str, str] = {}
        self._compressions: dict[tuple[str, int], Any] = {}

    @property
    def divisor(self) -> float:
        """What a reduced gradient must be divided by to be the mean: 1 where the backend averages."""
        return 1.0 if self._averages else float(self.size)

    def compress(self, kind: str, codec: str) -> None:
        """From now on what crosses between clusters of buckets' transfers of `kind` is in `codec` (docs/hierarchy.md):
        with what was left out added the next time, and of all-gathers what has changed. Local, on all ranks alike."""
        self._codecs[kind] = codec

    def forget(self) -> None:
        """Buckets have other numbers from now on. Local; nothing is under way."""
        self._compressions.clear()

    def _compressed(self, kind: str, bucket: int) -> contextlib.AbstractContextManager[None]:
        codec = self._codecs.get(kind)
        if codec is None or bucket < 0:
            return contextlib.nullcontext()
        kept = self._compressions.get((kind, bucket))
        if kept is None:
            options = {"rotation": codec != "bf16", "error_feedback": True, "differences": kind == ALL_GATHER}
            kept = self._compressions[kind, bucket] = holmes_comm.Compression(codec, **options)
        return holmes_comm.compressed(kept)

    def reduce_scatter(self, bucket: int, output: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Starts the mean (or sum, see `divisor`) of `source` [size * n] over the ranks into `output` [n]."""
        op = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        return self._start(
            REDUCE_SCATTER,
            bucket,
            source,
            lambda: _reduce_scatter(output, source, op, group=self.group, async_op=True),
        )

    def all_gather(self, bucket: int, output: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Starts the gathering of every rank's `source` [n] into `output` [size * n]."""
        return self._start(
            ALL_GATHER,
            bucket,
            output,
            lambda: _all_gather(output, source, group=self.group, async_op=True),
        )

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Blocks until `tensor` is the first rank's, and returns it."""
        if self.size > 1:
            source = ranks_of(self.group)[0]
            dist.broadcast(tensor, source, group=self.group)
        return tensor

    def all_reduce(self, kind: str, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> Transfer:
        """Starts an all-reduce in place."""
        return self._start(kind, -1, tensor, lambda: dist.all_reduce(tensor, op, group=self.group, async_op=True))

    def _start(self, kind: str, bucket: int, whole: torch.Tensor, start: Callable[[], dist.Work | None]) -> Transfer:
        submitted = time.monotonic()
        with self._compressed(kind, bucket):
            work = start() if self.size > 1 else None
        transfer = Transfer(kind, bucket, whole.numel() * whole.itemsize, submitted, work)
        if work is not None:
            self._pending.append(transfer)
        return transfer

    def collect(self) -> list[tuple[Transfer, float]]:
        """Local. The transfers that ended since the last call, in order, each with the time it began to run."""
        done = []
        last_end = self.ended[-1].ended_s if self.ended else 0.0
        while self._pending and self._pending[0].is_done():
            transfer = self._pending.pop(0)
            assert transfer.ended_s is not None
            start = min(max(transfer.submitted_s, last_end or 0.0), transfer.ended_s)
            done.append((transfer, start))
            last_end = transfer.ended_s
            self.ended = [transfer]
        return done


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """A group's ranks (None: the default group's), in the order that they have in it. Local."""
    ranks: list[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
    return ranks


#: Groups like another one that nobody uses at the moment: (the other one, the group).
_spare: list[tuple[Any, dist.ProcessGroup]] = []
#: How many groups like another one this process has made, or more: the greatest number that ranks it met have.
_made = 0


def take_group(group: dist.ProcessGroup | None, label: str, device: torch.device) -> dist.ProcessGroup | None:
    """Collective over `group`, in the same order on all ranks as `give_back_group`. As `second_group`, or one that was
    given back."""
    original = group or dist.group.WORLD
    _spare[:] = [pair for pair in _spare if pair[1] in dist.distributed_c10d._world.pg_map]
    for pair in _spare:
        if pair[0] is original:
            _spare.remove(pair)
            return pair[1]
    return second_group(group, label, device)


def give_back_group(group: dist.ProcessGroup | None, taken: dist.ProcessGroup) -> None:
    """`taken` was made by `take_group(group, ...)` and has nothing under way."""
    _spare.append((group or dist.group.WORLD, taken))


def second_group(group: dist.ProcessGroup | None, label: str, device: torch.device) -> dist.ProcessGroup | None:
    """Collective over `group`. Another one of the same ranks, backend, NICs and time limit (`device`'s);
    None where they cannot keep their order.

    Collectives of two groups run side by side, those of one group one after another.
    """
    global _made
    ranks = ranks_of(group)
    if ranks != sorted(ranks):
        return None
    ((_made,),) = agree(group, [[_made + 1]], device)
    backend, options = dist.get_backend(group), None
    if backend == "holmes":
        from holmes_comm.torch_backend import group_options

        options = group_options(group)
    with _named(f"holmes-{_made}-{hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}"):
        made: dist.ProcessGroup = dist.new_group(
            ranks,
            timeout=timeout_of(group, device),
            backend=backend,
            pg_options=options,
            use_local_synchronization=True,
            group_desc=label,
        )
    return made


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """The group that is made inside is called so.

    torch names one that only its members make after its ranks and how many groups a process has: a name comes again
    when a group was destroyed, and differs between ranks that are in more groups or in fewer.
    """
    torch_distributed: Any = dist.distributed_c10d
    own = torch_distributed._process_group_name
    torch_distributed._process_group_name = lambda *_, **__: name
    try:
        yield
    finally:
        torch_distributed._process_group_name = own


def _ended_s(work: dist.Work, submitted_s: float) -> float:
    """The engine's own measurement where the backend has one, else now."""
    try:
        return submitted_s + float(work._get_duration()) / 1e3  # type: ignore[attr-defined]
    except RuntimeError:
        return time.monotonic()


def _label(group: dist.ProcessGroup | None) -> str:
    if not dist.is_initialized():
        return "alone"
    description = (group or dist.distributed_c10d._get_default_group()).group_desc
    return description if description and description != "undefined" else "data parallel"


def _nics(group: dist.ProcessGroup | None) -> tuple[str, ...]:
    """What the group's connections really use, where its backend tells."""
    if dist.get_backend(group) != "holmes":
        return ()
    from holmes_comm.torch_backend import connections

    return tuple(sorted({row["interface"] or row["transport"] for row in connections(group)}))
