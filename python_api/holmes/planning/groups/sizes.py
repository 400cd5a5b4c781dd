"""Parallel sizes: what fits a topology, all that is wrong with those that do not, and the nearest that do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from holmes.cluster.topology import Cluster, Topology
from holmes.planning.schedule import fits_rounds
from holmes.words import to_text
from holmes_comm.errors import UsageError


@dataclass(frozen=True)
class Sizes:
    """Ranks along each axis; the data-parallel size follows from the number of ranks.

    `expert_tensor` None: as `tensor`. `chunks`: parts of the model on each stage.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    chunks: int = 1

    @property
    def expert_tensor_size(self) -> int:
        """The size of expert tensor groups."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    def text(self) -> str:
        """As the arguments of plan_for; those that are 1 are left out, but for tensor and pipeline."""
        named = {"tensor": self.tensor, "context": self.context, "pipeline": self.pipeline, "expert": self.expert}
        if self.expert_tensor is not None:
            named["expert_tensor"] = self.expert_tensor
        kept = {name: size for name, size in named.items() if size != 1 or name in ("tensor", "pipeline")}
        return ", ".join(f"{name}={size}" for name, size in kept.items())


@dataclass(frozen=True)
class Limits:
    """What sizes must fit: ranks of each host and cluster; layers of the model and samples, where they are known.

    `span_clusters`: stages need not lie inside one cluster.
    """

    ranks_of_host: Mapping[str, int]
    ranks_of_cluster: Mapping[str, int]
    model_layers: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    span_clusters: bool = False

    @classmethod
    def of(
        cls,
        topology: Topology,
        model_layers: int | None = None,
        micro_batch: int | None = None,
        global_batch: int | None = None,
        span_clusters: bool = False,
    ) -> Limits:
        """Those of a topology."""
        hosts = {host.name: len(host.ranks) for host in topology.hosts}
        clusters = {cluster.name: len(cluster.ranks) for cluster in topology.clusters}
        return cls(hosts, clusters, model_layers, micro_batch, global_batch, span_clusters)

    @property
    def world_size(self) -> int:
        """Ranks of all hosts."""
        return sum(self.ranks_of_host.values())

    @property
    def host_unit(self) -> int:
        """Tensor sizes must divide it."""
        return math.gcd(*self.ranks_of_host.values())

    @property
    def stage_unit(self) -> int:
        """The ranks of a stage must divide it."""
        return self.world_size if self.span_clusters else math.gcd(*self.ranks_of_cluster.values())

    def stage_widths(self, chunks: int = 1) -> list[int]:
        """The possible numbers of ranks of a stage, largest first."""
        widths = [width for width in divisors(self.stage_unit) if self._layers_suffice(width, chunks)]
        return widths[::-1]

    def _layers_suffice(self, width: int, chunks: int) -> bool:
        return self.model_layers is None or self.world_size // width * chunks <= self.model_layers


def divisors(number: int) -> list[int]:
    """Ascending."""
    low = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return low + [number // i for i in reversed(low) if i * i != number]


def check_sizes(topology: Topology, limits: Limits, sizes: Sizes) -> None:
    """Raises one ValueError that holds every rule the sizes break, with all numbers, and the nearest fix."""
    wrong = problems(limits, sizes)
    near = nearest(limits, sizes) if wrong else sizes
    if near is not None and (batch := _batch_problem(limits, near)):
        wrong.append(batch[0])
    if wrong:
        fix = "; or ".join(fixes(topology, limits, sizes))
        raise UsageError(f"{sizes.text()} does not fit: {'; '.join(wrong)}. Fix: {fix}")


def fixes(topology: Topology, limits: Limits, sizes: Sizes) -> list[str]:
    """What would make the sizes fit, or sizes that do; each in words, best first."""
    wrong = problems(limits, sizes)
    near = nearest(limits, sizes) if wrong else sizes
    if near is None:
        return [f"a model of at least {limits.world_size // limits.stage_unit * sizes.chunks} layers"]
    found = []
    if wrong:
        works = _pipelines(limits, sizes)
        also = f" (with the other sizes as they are: pipeline {_listed(works)})" if works else ""
        found.append(f"the nearest sizes that fit: {near.text()}{also}")
    if batch := _batch_problem(limits, near):
        found[-1:] = [f"{found[-1]}, with {batch[1]}" if found else batch[1]]
    if wrong and (left_out := _leave_out(topology, limits, sizes)):
        found.append(left_out)
    return found


def possible_pipelines(topology: Topology, sizes: Sizes, model_layers: int | None = None) -> list[int]:
    """All pipeline sizes that fit with the other sizes as they are, ascending."""
    limits = Limits.of(topology, model_layers)
    return _pipelines(limits, sizes)


def problems(limits: Limits, sizes: Sizes) -> list[str]:
    """Every rule that the sizes break, in words; empty where they fit."""
    named = {"tensor": sizes.tensor, "context": sizes.context, "pipeline": sizes.pipeline, "expert": sizes.expert}
    named |= {"expert_tensor": sizes.expert_tensor_size, "chunks": sizes.chunks}
    if low := [f"{name}={size}" for name, size in named.items() if size < 1]:
        return [f"{' and '.join(low)} must be at least 1"]
    found = []
    for name in ("tensor", "expert_tensor"):
        follows = name == "expert_tensor" and sizes.expert_tensor is None
        if limits.host_unit % named[name] and not follows:
            found.append(f"{name}={named[name]} must divide the ranks of every host ({numbers(limits.ranks_of_host)})")
    world, pipeline = limits.world_size, sizes.pipeline
    layers = limits.model_layers
    if layers is not None and layers < pipeline * sizes.chunks:
        parts = f"{pipeline} pipeline stages" + (f" * {sizes.chunks} chunks" if sizes.chunks > 1 else "")
        found.append(f"{layers} layers cannot fill {parts}")
    if world % pipeline:
        return [*found, f"{world} ranks / pipeline={pipeline} is not a whole number"]
    width = world // pipeline
    if not limits.span_clusters and limits.stage_unit % width:
        found.append(
            f"a stage of {width} ranks ({world} / pipeline={pipeline}) does not divide the ranks of every cluster "
            f"({numbers(limits.ranks_of_cluster)})"
        )
    for one, other in (("tensor", "context"), ("expert_tensor", "expert")):
        product = named[one] * named[other]
        if width % product and (other == "context" or sizes.expert > 1 or sizes.expert_tensor is not None):
            found.append(
                f"{one}={named[one]} * {other}={named[other]} = {product} must divide a stage of {width} ranks"
            )
    return found


def _batch_problem(limits: Limits, sizes: Sizes) -> tuple[str, str] | None:
    """What is wrong with the samples of a step for sizes that fit, and the fix; None where nothing is."""
    if limits.micro_batch is not None and limits.micro_batch < 1:
        return f"micro_batch={limits.micro_batch} must be at least 1", "micro_batch=1"
    if limits.global_batch is None:
        return None
    data = limits.world_size // (sizes.tensor * sizes.context * sizes.pipeline)
    wrong = batch_problem(limits.global_batch, limits.micro_batch, data, sizes.pipeline, sizes.chunks)
    return None if wrong is None else (wrong[0], f"global_batch={wrong[1]}")


def batch_problem(
    global_batch: int, micro_batch: int | None, data: int, pipeline: int = 1, chunks: int = 1, schedule: str = "1f1b"
) -> tuple[str, int] | None:
    """What is wrong with the samples of a step, and the nearest number that is right; None where nothing is."""
    unit = data * (micro_batch or 1) * (pipeline if chunks > 1 else 1)
    count = max(round(global_batch / unit), 1)
    near = count
    if micro_batch is not None and chunks == 1:
        around = (each for step in range(pipeline) for each in (count - step, count + step))
        near = next(each for each in around if each > 0 and fits_rounds(schedule, pipeline, each))
    micro = "" if micro_batch is None else f" * micro_batch={micro_batch}"
    if global_batch <= 0 or global_batch % unit:
        stages = f" * pipeline={pipeline} (interleaved)" if chunks > 1 else ""
        return f"global_batch={global_batch} must be a multiple of data={data}{micro}{stages} = {unit}", near * unit
    if near == count:
        return None
    return (
        f"global_batch={global_batch} over data={data}{micro} is {count} micro-batches, but schedule={schedule!r} "
        f"takes as many as its {count // pipeline} whole rounds of pipeline={pipeline} divide",
        near * unit,
    )


def _pipelines(limits: Limits, sizes: Sizes) -> list[int]:
    options = [replace(sizes, pipeline=limits.world_size // width) for width in limits.stage_widths(sizes.chunks)]
    return [option.pipeline for option in options if not problems(limits, option)]


def nearest(limits: Limits, wanted: Sizes) -> Sizes | None:
    """The sizes that fit and differ in the fewest numbers, then by the smallest ratios; None where none fit."""
    found = list(_nearest_of_each_width(limits, wanted))
    return min(found, key=lambda item: item[0])[1] if found else None


def _nearest_of_each_width(limits: Limits, wanted: Sizes) -> Iterator[tuple[tuple[float, ...], Sizes]]:
    tensors = divisors(limits.host_unit)
    for width in limits.stage_widths(wanted.chunks):
        pipeline = limits.world_size // width
        for tensor in (size for size in tensors if width % size == 0):
            context = _closest(divisors(width // tensor), wanted.context)
            experts = tensors if wanted.expert_tensor is not None else [tensor]
            options = [
                (expert_tensor, _closest(divisors(width // expert_tensor), wanted.expert))
                for expert_tensor in experts
                if width % expert_tensor == 0
            ]
            for expert_tensor, expert in options:
                sizes = Sizes(
                    tensor,
                    context,
                    pipeline,
                    expert,
                    expert_tensor if wanted.expert_tensor is not None else None,
                    wanted.chunks,
                )
                yield _distance(sizes, wanted), sizes


def _distance(sizes: Sizes, wanted: Sizes) -> tuple[float, ...]:
    pairs = [
        (sizes.tensor, wanted.tensor),
        (sizes.context, wanted.context),
        (sizes.pipeline, wanted.pipeline),
        (sizes.expert, wanted.expert),
        (sizes.expert_tensor or 1, wanted.expert_tensor or 1),
    ]
    return (
        sum(size != other for size, other in pairs),
        sum(_apart(size, other) for size, other in pairs),
        *(size for size, _ in pairs),
    )


def _apart(size: int, other: int) -> float:
    return abs(math.log(size / max(other, 1))) + (other < 1)


def _closest(sizes: Sequence[int], wanted: int) -> int:
    return min(sizes, key=lambda size: (_apart(size, wanted), size))


def _leave_out(topology: Topology, limits: Limits, sizes: Sizes) -> str | None:
    """With which ranks left out the sizes fit: the fewest; None where none need be, or it would be a whole cluster."""
    if min(sizes.tensor, sizes.context, sizes.pipeline, sizes.expert, sizes.expert_tensor_size) < 1:
        return None
    if limits.host_unit % math.lcm(sizes.tensor, sizes.expert_tensor_size):
        return None
    unit = math.lcm(sizes.tensor * sizes.context, sizes.expert_tensor_size * sizes.expert)
    counts = list(limits.ranks_of_cluster.values())
    for width in range(limits.world_size // sizes.pipeline // unit * unit, 0, -unit):
        if sum(count // width for count in counts) >= sizes.pipeline:
            break
    else:
        return None
    if limits.model_layers is not None and limits.model_layers < sizes.pipeline * sizes.chunks:
        return None
    left, pieces = sizes.pipeline, []
    for cluster in topology.clusters:
        stages = min(len(cluster.ranks) // width, left)
        if stages == 0:
            return None  # a whole cluster: not what was asked for
        left -= stages
        if out := _last(cluster, len(cluster.ranks) - stages * width):
            pieces.append(f"{to_text(out)} of {cluster.name}")
    if not pieces:
        return None
    return f"leave out ranks {' and '.join(pieces)}: stages of {width} ranks then"


def _last(cluster: Cluster, count: int) -> list[int]:
    return list(cluster.ranks[len(cluster.ranks) - count :])


def numbers(counts: Mapping[str, int]) -> str:
    """Counts by name, for messages: equal ones together, at most eight named."""
    if len(set(counts.values())) == 1 and len(counts) > 4:
        return f"{len(counts)} times {next(iter(counts.values()))}"
    named = [f"{name}: {count}" for name, count in counts.items()]
    return ", ".join(named[:8]) + (f", ... {len(named)} in all" if len(named) > 8 else "")


def _listed(works: Sequence[int]) -> str:
    return ", ".join(map(str, works[:12])) + (", ..." if len(works) > 12 else "")
