"""What the search tries: sizes, micro-batches, schedules, recomputation, and orders of the clusters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holmes.cluster.topology import Topology
from holmes.planning.groups.sizes import Limits, Sizes, check_sizes, divisors, problems
from holmes.planning.model.gpt import RECOMPUTATIONS, Transformer, check_recomputation
from holmes.planning.schedule import SCHEDULES, check_schedule, fits_rounds, trainer_named
from holmes.planning.search.machines import ClusterMachines, Machines
from holmes_comm.errors import UsageError

_MOST_ORDERS = 24
_MOST_CHUNKS = 8


@dataclass(frozen=True)
class Choice:
    """One way to run the model. `order`: positions of the clusters in `Machines`, first stage first; `warms`: whether
    stages may begin with more forwards than the schedule's own, which trainers have no word for."""

    tensor: int
    data: int
    pipeline: int
    micro_batch: int
    schedule: str
    chunks: int
    recomputation: str
    order: tuple[int, ...]
    warms: bool = False

    def micro_batches(self, global_batch: int) -> int:
        """Of a step, through each replica."""
        return global_batch // (self.data * self.micro_batch)

    def text(self) -> str:
        """In a few words."""
        chunks = f" x{self.chunks}" if self.chunks > 1 else ""
        return (
            f"tensor {self.tensor}, data {self.data}, pipeline {self.pipeline}, micro-batch {self.micro_batch}, "
            f"{self.schedule}{chunks}, recomputation {self.recomputation}"
        )


@dataclass(frozen=True)
class Wanted:
    """What a person has decided already; None: the search does."""

    tensor: int | None = None
    pipeline: int | None = None
    micro_batch: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    recomputation: str | None = None
    trainer: str | None = None  # only what it can run

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "micro_batch", "chunks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}={value} must be at least 1")
        if self.recomputation is not None:
            check_recomputation(self.recomputation)
        if self.schedule is not None:
            check_schedule(self.schedule, self.chunks or (2 if self.schedule == "interleaved" else 1))
        if self.trainer is not None:
            trainer = trainer_named(self.trainer)
            for name, known in (("schedule", trainer.schedules), ("recomputation", trainer.recomputations)):
                value = getattr(self, name)
                if value not in (None, *known):
                    raise UsageError(f"{name}={value!r} is nothing that {trainer.title} has: {', '.join(known)}")

    @property
    def schedules(self) -> tuple[str, ...]:
        """Those to try."""
        return (
            (self.schedule,) if self.schedule else trainer_named(self.trainer).schedules if self.trainer else SCHEDULES
        )

    @property
    def recomputations(self) -> tuple[str, ...]:
        """Those to try."""
        if self.recomputation:
            return (self.recomputation,)
        return trainer_named(self.trainer).recomputations if self.trainer else RECOMPUTATIONS


def choices(
    topology: Topology,
    machines: Machines,
    model: Transformer,
    global_batch: int,
    wanted: Wanted,
    cluster_orders: Sequence[tuple[int, ...]],
) -> Iterator[Choice]:
    """All choices with these orders of the clusters whose sizes fit, before memory.

    Raises ValueError, with the nearest fix, where there are none.
    """
    limits = Limits.of(topology, model.layers)
    sizes = list(_sizes(topology, limits, model, wanted))
    found = False
    for tensor, pipeline in sizes:
        data = machines.ranks // (tensor * pipeline)
        for micro_batch in _micro_batches(global_batch, data, wanted):
            count = global_batch // (data * micro_batch)
            for schedule, chunks in _schedules(pipeline, count, model.layers, wanted):
                for recomputation in wanted.recomputations:
                    for order in cluster_orders:
                        found = True
                        sizes_of = (tensor, data, pipeline, micro_batch)
                        yield Choice(*sizes_of, schedule, chunks, recomputation, order, wanted.trainer is None)
    if not found:
        raise _no_batch(machines, sizes, global_batch, wanted)


def _sizes(topology: Topology, limits: Limits, model: Transformer, wanted: Wanted) -> Iterator[tuple[int, int]]:
    tensors = [size for size in divisors(limits.host_unit) if model.heads % size == 0]
    pipelines = [limits.world_size // width for width in limits.stage_widths(wanted.chunks or 1)]
    if wanted.tensor is not None and model.heads % wanted.tensor:
        raise UsageError(
            f"tensor={wanted.tensor} must divide heads={model.heads} of the model and the ranks of every host; "
            f"those that do: {tensors}"
        )
    found = False
    for tensor in [wanted.tensor] if wanted.tensor is not None else tensors:
        for pipeline in [wanted.pipeline] if wanted.pipeline is not None else pipelines:
            if not problems(limits, Sizes(tensor=tensor, pipeline=pipeline, chunks=wanted.chunks or 1)):
                found = True
                yield tensor, pipeline
    if not found:
        tensor, pipeline = wanted.tensor or 1, wanted.pipeline or limits.world_size // limits.stage_unit
        check_sizes(topology, limits, Sizes(tensor=tensor, pipeline=pipeline, chunks=wanted.chunks or 1))


def _micro_batches(global_batch: int, data: int, wanted: Wanted) -> list[int]:
    """Powers of two of which the global batch is a multiple over all replicas, or the one that is wanted."""
    sizes = [wanted.micro_batch] if wanted.micro_batch is not None else [2**i for i in range(8)]
    return [size for size in sizes if size > 0 and global_batch > 0 and global_batch % (data * size) == 0]


def _schedules(pipeline: int, micro_batches: int, layers: int, wanted: Wanted) -> Iterator[tuple[str, int]]:
    if pipeline == 1:
        if wanted.schedule in (None, "1f1b"):
            yield "1f1b", 1  # one stage: all schedules are one
        elif wanted.schedule != "interleaved":
            yield wanted.schedule or "1f1b", 1
        return
    for schedule in wanted.schedules:
        if not _runs(schedule, pipeline, micro_batches, wanted):
            continue
        if schedule != "interleaved":
            if wanted.chunks in (None, 1):
                yield schedule, 1
        else:
            for chunks in [wanted.chunks] if wanted.chunks else range(2, _MOST_CHUNKS + 1):
                if pipeline * chunks <= layers and chunks > 1:
                    yield schedule, chunks


def _runs(schedule: str, pipeline: int, micro_batches: int, wanted: Wanted) -> bool:
    trainer = None if wanted.trainer is None else trainer_named(wanted.trainer)
    has_enough = trainer is None or trainer.runs(schedule, pipeline, micro_batches)
    return has_enough and fits_rounds(schedule, pipeline, micro_batches)


def _no_batch(machines: Machines, sizes: Sequence[tuple[int, int]], global_batch: int, wanted: Wanted) -> ValueError:
    """No micro-batch divides the batch, or none of the wanted schedules runs so many."""
    micro_batch = wanted.micro_batch or 1
    data = {(pipeline, machines.ranks // (tensor * pipeline)) for tensor, pipeline in sizes}
    units = sorted({replicas * micro_batch for _, replicas in data})
    near = min(
        (
            count * replicas * micro_batch
            for pipeline, replicas in data
            for schedule in wanted.schedules
            for count in _counts(global_batch / (replicas * micro_batch), pipeline)
            if _runs(schedule, pipeline, count, wanted)
        ),
        key=lambda n: (abs(n - global_batch), n),
    )
    rule = ""
    if wanted.schedule == "interleaved" or (wanted.chunks or 1) > 1:
        rule = " and, interleaved, a number of micro-batches that the stages divide"
    elif wanted.schedule == "zb-h1":
        rule = " and, with zb-h1, a number of micro-batches that its whole rounds of all stages divide"
    elif wanted.trainer is not None and trainer_named(wanted.trainer).fills_1f1b:
        rule = f" and, with 1f1b in {trainer_named(wanted.trainer).title}, at least as many micro-batches as stages"
    return ValueError(
        f"global_batch={global_batch} must be a multiple of data * micro_batch={micro_batch}, which with the sizes "
        f"that fit is one of {units}{rule}; the nearest is global_batch={near}"
    )


def _counts(wanted: float, pipeline: int) -> Iterator[int]:
    """Numbers of micro-batches next to that, among which every schedule finds one that it runs."""
    middle = max(round(wanted), 1)
    yield from range(max(middle - pipeline, 1), middle + 2 * pipeline + 1)


def orders(machines: Machines) -> list[tuple[int, ...]]:
    """Orders of the clusters to try: all that differ, or some where these are too many (by speed, memory, NICs)."""
    kinds = [cluster.kind for cluster in machines.clusters]
    count = math.factorial(len(kinds))
    for kind in set(kinds):
        count //= math.factorial(kinds.count(kind))
    everyone = range(len(kinds))
    if count <= _MOST_ORDERS and not machines.between and len(kinds) <= 6:
        found: dict[tuple[object, ...], tuple[int, ...]] = {}
        for order in itertools.permutations(everyone):
            found.setdefault(tuple(kinds[i] for i in order), order)
        return list(found.values())
    clusters = machines.clusters

    def network(cluster: ClusterMachines) -> float:
        return cluster.network.rate.gbps if cluster.network else 0.0

    some = [tuple(everyone), tuple(reversed(everyone))]
    for sign in (1, -1):
        some.append(tuple(sorted(everyone, key=lambda i: sign * clusters[i].tflops)))
        some.append(tuple(sorted(everyone, key=lambda i: sign * clusters[i].memory_bytes)))
        some.append(tuple(sorted(everyone, key=lambda i: sign * network(clusters[i]))))
    some += [_by_links(machines, first) for first in everyone]
    return list(dict.fromkeys(some))


def _by_links(machines: Machines, first: int) -> tuple[int, ...]:
    """From this cluster on, each next one is that with the widest way from the one before."""
    order, left = [first], [i for i in range(len(machines.clusters)) if i != first]
    while left:
        last = machines.clusters[order[-1]].name

        def width(i: int, last: str = last) -> tuple[float, int]:
            return machines.host_gbps(last, machines.clusters[i].name, machines.clusters[i].hosts), -i

        order.append(max(left, key=width))
        left.remove(order[-1])
    return tuple(order)
