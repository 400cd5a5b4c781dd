"""Candidates: choices with their exact partition and simulated step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from holmes.planning.partition import Partition, best_partition, split_evenly
from holmes.planning.partition import evaluate as evaluate_partition
from holmes.planning.schedule import WARMED, warmup_of
from holmes.planning.search.layout import Layout
from holmes.planning.search.space import Choice
from holmes.planning.simulate import Result, Step, make_step, simulate
from holmes.planning.simulate.best import SAME, best_warmup

_UNEVEN_LOSSES = 0.005  # of a step: below, another split of the layers cannot gain
_MOST_OPERATIONS = 8_192  # of all stages: some tenths of a second
_WARMUPS = 4_096  # operations of all steps in which warm-ups are tried


@dataclass(frozen=True)
class Candidate:
    """One way to run the model, simulated. Memory is of one GPU of the fullest stage, relative to its limit. `warmup`:
    a plan's."""

    choice: Choice
    layers_per_chunk: tuple[tuple[int, ...], ...]
    step_s: float
    tflops_per_gpu: float
    samples_per_s: float
    bubble_share: float
    exposed_s: Mapping[str, float]  # by kind, mean of the stages
    bottleneck_link: str | None
    memory_bytes: float
    memory_limit_bytes: float
    fullest_stage: int
    is_optimal: bool
    warmup: tuple[int, ...] | None = None

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Transformer layers of each stage."""
        return tuple(sum(chunks) for chunks in self.layers_per_chunk)


@dataclass(frozen=True)
class _Simulated:
    """A step; `losses_s`: what each stage waits for its gradients and parameters."""

    partition: Partition
    step_s: float
    bubble_s: float
    exposed_s: dict[str, float]
    losses_s: tuple[float, ...]
    bottleneck_link: str | None
    warmup: tuple[int, ...] | None = None


def evaluate(layout: Layout) -> Candidate:
    """Partitions and simulates a choice: by compute alone, and once more with what each stage then loses to its network
    counted as slowness; the faster one counts, with the forwards first that its distances want and memory has room for.
    Raises ValueError where memory cannot fit."""
    best = _simulated(layout, _partition(layout, None))
    if layout.choice.pipeline > 1 and max(best.losses_s) - min(best.losses_s) > _UNEVEN_LOSSES * best.step_s:
        other = _partition(layout, best.losses_s)
        if other.layers_per_stage != best.partition.layers_per_stage:
            best = min(best, _simulated(layout, other), key=lambda simulated: simulated.step_s)
    if layout.choice.warms and layout.choice.schedule in WARMED and best.exposed_s["p2p"] > SAME * best.step_s:
        best = _warmed(layout, best)
    return _candidate(layout, best)


def _warmed(layout: Layout, plain: _Simulated) -> _Simulated:
    """With more forwards first, as many as memory has room for beside this partition, where that is faster."""
    partition = plain.partition
    held, each = _held(layout, None), _activation_bytes(layout, partition)
    spare = [cluster.memory_bytes - used for used, cluster in zip(partition.memory_bytes, layout.clusters, strict=True)]
    # What no activation takes has room for all.
    room = [
        count + int(max(bytes_left, 0.0) // size if size > 0 else layout.micro_batches)
        for count, bytes_left, size in zip(held, spare, each, strict=True)
    ]
    step = make_step(layout.job(partition.layers_per_stage), layout.rates)
    found = best_warmup(replace(step, micro_batches=min(layout.micro_batches, _most(layout))), room, _WARMUPS)
    if found is None or found.warmup is None:
        return plain
    warmed = _simulated(layout, partition, found.warmup)
    more = [new - old for new, old in zip(_held(layout, found.warmup), held, strict=True)]
    memory = tuple(used + n * size for used, n, size in zip(partition.memory_bytes, more, each, strict=True))
    return min(plain, replace(warmed, partition=replace(partition, memory_bytes=memory)), key=lambda one: one.step_s)


def _held(layout: Layout, warmup: tuple[int, ...] | None) -> list[int]:
    """Micro-batches in flight of each stage. In "zb-h1" all hold as many as the first one."""
    stages, first = layout.choice.pipeline, layout.choice.schedule == "zb-h1"
    return [warmup_of(stages, 0 if first else i, layout.micro_batches, warmup) for i in range(stages)]


def _activation_bytes(layout: Layout, partition: Partition) -> list[float]:
    """Of one micro-batch, on each stage."""
    sums = layout.problem().prefix["activation"]
    return [float(sums[end] - sums[begin]) for begin, end in pairwise(partition.cuts)]


def _most(layout: Layout) -> int:
    """Micro-batches that are simulated."""
    unit = layout.choice.pipeline
    return max(_MOST_OPERATIONS // (unit * layout.choice.chunks) // unit, 3) * unit


def _partition(layout: Layout, losses_s: tuple[float, ...] | None) -> Partition:
    """The optimum; of interleaved ones, whose stages may fill their chunks in many ways, that with even chunks."""
    problem = layout.problem(losses_s)
    best = best_partition(problem)
    chunks, stages = layout.choice.chunks, layout.choice.pipeline
    if chunks == 1:
        return best
    even = [split_evenly(layers, chunks) for layers in best.layers_per_stage]
    other = evaluate_partition(problem, [even[stage][chunk] for chunk in range(chunks) for stage in range(stages)])
    fits = all(used <= cluster.memory_bytes for used, cluster in zip(other.memory_bytes, layout.clusters, strict=True))
    # The bottleneck stays: a stage's time is the sum of its chunks'. Links may be the worse ones.
    return replace(other, is_optimal=best.is_optimal) if fits and other.bottleneck_s <= best.bottleneck_s else best


def _simulated(layout: Layout, partition: Partition, warmup: tuple[int, ...] | None = None) -> _Simulated:
    """The step; of very many micro-batches only some are simulated: each further one takes as long as the last ones."""
    step: Step = replace(make_step(layout.job(partition.layers_per_stage), layout.rates), warmup=warmup)
    unit, most = layout.choice.pipeline, _most(layout)
    if layout.micro_batches <= most:
        return _summary(partition, simulate(step), warmup)
    fewer = _summary(partition, simulate(replace(step, micro_batches=most - unit)))
    more = _summary(partition, simulate(replace(step, micro_batches=most)))
    factor = (layout.micro_batches - most) / unit

    def on(low: float, high: float) -> float:
        return high + factor * (high - low)

    return _Simulated(
        partition,
        on(fewer.step_s, more.step_s),
        on(fewer.bubble_s, more.bubble_s),
        {kind: on(fewer.exposed_s[kind], time_s) for kind, time_s in more.exposed_s.items()},
        tuple(on(low, high) for low, high in zip(fewer.losses_s, more.losses_s, strict=True)),
        more.bottleneck_link,
        warmup,
    )


def _summary(partition: Partition, result: Result, warmup: tuple[int, ...] | None = None) -> _Simulated:
    return _Simulated(
        partition,
        result.step_s,
        result.bubble_share * result.step_s,
        result.exposed_s,
        tuple(device.exposed_s["reduce"] + device.exposed_s["gather"] for device in result.devices),
        result.bottleneck_link,
        warmup,
    )


def _candidate(layout: Layout, simulated: _Simulated) -> Candidate:
    choice, partition = layout.choice, simulated.partition
    shares = [
        used / cluster.memory_bytes for used, cluster in zip(partition.memory_bytes, layout.clusters, strict=True)
    ]
    fullest = shares.index(max(shares))
    parts = partition.layers_per_part
    samples_per_s = layout.global_batch / simulated.step_s
    # Operations that the model needs, as usual: what is computed a second time does not count.
    flops = layout.model.flops_per_sample("none")
    return Candidate(
        choice=choice,
        layers_per_chunk=tuple(tuple(parts[i :: choice.pipeline]) for i in range(choice.pipeline)),
        step_s=simulated.step_s,
        tflops_per_gpu=flops * samples_per_s / layout.machines.ranks / 1e12,
        samples_per_s=samples_per_s,
        bubble_share=simulated.bubble_s / simulated.step_s,
        exposed_s=simulated.exposed_s,
        bottleneck_link=simulated.bottleneck_link,
        memory_bytes=partition.memory_bytes[fullest],
        memory_limit_bytes=layout.clusters[fullest].memory_bytes,
        fullest_stage=fullest,
        is_optimal=partition.is_optimal,
        warmup=simulated.warmup,
    )
