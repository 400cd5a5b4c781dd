"""What is partitioned (layers), over what (stages and the links between them), what a partition costs, and the
rules that need no times of layers: an even split, and the Holmes paper's split by speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Integral

import numpy as np
import numpy.typing as npt

from holmes.planning.schedule import check_schedule, in_flight
from holmes_comm.errors import UsageError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LAYER_KINDS = ("transformer", "embedding", "head")
PAPER_ALPHA = 1.05  # of the Holmes paper (arXiv 2312.03549), section on self-adapting pipeline partition


@dataclass(frozen=True)
class Layer:
    """One unit that a stage holds whole: a transformer layer, the embedding, or the head with the loss.

    Times are of one micro-batch on a stage of speed 1, measured or modelled; `backward_s` includes recomputation.
    `state_bytes`: parameters, gradients, optimizer state. `activation_bytes`: kept from forward to backward, for each
    micro-batch in flight. `working_bytes`: only while this layer runs. `output_bytes`: sent on if the next stage starts
    after this layer (its gradient, of the same size, comes back). Bytes are of one GPU.
    """

    forward_s: float
    backward_s: float
    kind: str = "transformer"
    state_bytes: float = 0
    activation_bytes: float = 0
    working_bytes: float = 0
    output_bytes: float = 0

    def __post_init__(self) -> None:
        if self.kind not in LAYER_KINDS:
            raise UsageError(f"kind={self.kind!r} of a layer must be one of {list(LAYER_KINDS)}")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name != "kind" and not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{entry.name}={value} of a layer must be finite and not negative")


@dataclass(frozen=True)
class Stage:
    """The GPUs of one stage: `speed` relative to where layer times were taken (2: half the time); memory of one GPU.

    `memory_bytes` is what layers may fill (less what the driver, kernels and buffers need); None: no limit.
    """

    speed: float = 1.0
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise UsageError(f"speed={self.speed} of a stage must be positive and finite")
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise UsageError(f"memory_bytes={self.memory_bytes} of a stage must be positive, or None for no limit")


@dataclass(frozen=True)
class Link:
    """From one stage to the next, full duplex: what one GPU gets of it. Where links share a wire, each one's share."""

    rate_gbps: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate_gbps > 0:
            raise UsageError(f"rate_gbps={self.rate_gbps} of a link must be positive")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise UsageError(f"latency_s={self.latency_s} of a link must be finite and not negative")


@dataclass(frozen=True)
class PartitionProblem:
    """All that decides a partition.

    `links[i]` joins stage i to stage i + 1; with chunks > 1 there is one more, from the last stage to the first; empty:
    transfers cost nothing. A transfer takes latency + bytes * 8 / rate. Where it is not hidden (`overlap_transfers`
    False), both stages wait for the activation and for the gradient: 2 transfers each per micro-batch. Where it is
    hidden, the link itself may be the bottleneck, at 1 transfer per micro-batch and direction.

    `chunks`: model chunks of each stage (above 1 with schedule "interleaved"); chunk c of the model runs on stage
    c % stages. `least_layers`: transformer layers that every chunk holds; 0 allows one that holds the embedding or the
    head alone.
    """

    layers: tuple[Layer, ...]
    stages: tuple[Stage, ...]
    links: tuple[Link, ...] = ()
    micro_batches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    overlap_transfers: bool = False
    least_layers: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "stages", "links"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_whole(micro_batches=self.micro_batches, chunks=self.chunks, least_layers=self.least_layers)
        if self.micro_batches < 1 or self.least_layers < 0:
            raise UsageError(
                f"micro_batches={self.micro_batches} must be at least 1, least_layers={self.least_layers} at least 0"
            )
        check_schedule(self.schedule, self.chunks)
        if self.chunks > 1 and len(self.stages) < 2:
            raise UsageError(f"chunks={self.chunks} needs at least 2 stages; there is 1; use chunks=1")
        wanted = len(self.stages) - (self.chunks == 1)
        if self.links and len(self.links) != wanted:
            raise UsageError(
                f"{len(self.links)} links for {len(self.stages)} stages with chunks={self.chunks}; there must be "
                f"{wanted}, or none where transfers cost nothing"
            )
        check_counts(len(self.layers), len(self.stages))
        transformers = sum(layer.kind == "transformer" for layer in self.layers)
        needed = len(self.stages) * self.chunks
        if transformers < needed * self.least_layers or len(self.layers) < needed:
            have = transformers // self.least_layers if self.least_layers else len(self.layers)
            raise UsageError(
                f"{transformers} transformer layers ({len(self.layers)} with embedding and head) cannot fill "
                f"{len(self.stages)} stages * {self.chunks} chunks = {needed} with least_layers={self.least_layers} "
                f"each; use {max(have // self.chunks, 1)} stages or fewer, or a model of at least "
                f"{needed * max(self.least_layers, 1)} layers"
            )

    @property
    def virtual_stages(self) -> int:
        """Stages times chunks: the contiguous parts of the model, in model order."""
        return len(self.stages) * self.chunks

    @cached_property
    def prefix(self) -> dict[str, Floats]:
        """Sums over the layers before each position, 0 to len(layers): "time", "state", "activation", "count"."""
        columns = {
            "time": [layer.forward_s + layer.backward_s for layer in self.layers],
            "state": [layer.state_bytes for layer in self.layers],
            "activation": [layer.activation_bytes for layer in self.layers],
            "count": [float(layer.kind == "transformer") for layer in self.layers],
        }
        return {name: np.concatenate([[0.0], np.cumsum(values)]) for name, values in columns.items()}

    @cached_property
    def working_bytes(self) -> Floats:
        """[j, k]: the largest `working_bytes` of layers j to k - 1; 0 where there are none."""
        size = len(self.layers)
        working = np.array([layer.working_bytes for layer in self.layers], dtype=np.float64)
        table = np.zeros((size + 1, size + 1))
        later = np.arange(size)[None, :] >= np.arange(size + 1)[:, None]
        table[:, 1:] = np.maximum.accumulate(np.where(later, working, 0.0), axis=1)
        return table

    @cached_property
    def _output(self) -> Floats:
        return np.array([0.0, *(layer.output_bytes for layer in self.layers)])

    def transfer_s(self, part: int, cut: Ints) -> Floats:
        """Seconds of one transfer from part `part` of the model to the next, where the next starts at layer `cut`."""
        if not self.links or not 0 <= part < self.virtual_stages - 1:
            return np.zeros(np.shape(cut))
        link = self.links[part % len(self.stages)]
        return np.asarray(link.latency_s + self._output[cut] * 8 / (link.rate_gbps * 1e9))

    def moments(self, stage: int) -> Ints:
        """Micro-batches in flight of a stage's chunks, as `in_flight` gives them."""
        return in_flight(self.schedule, len(self.stages), self.chunks, self.micro_batches, stage)


@dataclass(frozen=True)
class Partition:
    """Which layers each part of the model holds, and what it costs. Part c runs on stage c % stages.

    Part c holds layers cuts[c] to cuts[c + 1] - 1 of the problem, embedding and head included. `stage_s`: a stage's
    time per micro-batch, all its chunks and the transfers it waits for; `link_s`: each link's, where transfers are
    hidden; `memory_bytes`: each stage's peak on one GPU. `is_optimal`: proven, not only the best that was found.
    """

    cuts: tuple[int, ...]
    layers_per_part: tuple[int, ...]
    stage_s: tuple[float, ...]
    link_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    is_optimal: bool = field(default=False, compare=False)

    @property
    def bottleneck_s(self) -> float:
        """Time of the slowest stage or link per micro-batch: what a long run of micro-batches takes each."""
        return max(*self.stage_s, *self.link_s)

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Transformer layers of every stage, all its chunks."""
        stages = len(self.stage_s)
        return tuple(sum(self.layers_per_part[stage::stages]) for stage in range(stages))


def equal_layers(count: int, layer_s: float = 1.0) -> tuple[Layer, ...]:
    """`count` transformer layers of `layer_s` each, a third of it forward; without memory, output or other layers."""
    return (Layer(layer_s / 3, layer_s * 2 / 3),) * count


def evaluate(problem: PartitionProblem, layers_per_part: Sequence[int]) -> Partition:
    """What a given split costs: transformer layers of each part (stage, or chunk in model order). No limit is checked.

    The embedding goes with the first part, the head with the last. Raises ValueError where the numbers do not sum up.
    """
    total = int(problem.prefix["count"][-1])
    counts = list(layers_per_part)
    if len(counts) != problem.virtual_stages or sum(counts) != total or min(counts) < 1:
        raise UsageError(
            f"layers_per_part={counts} sum to {sum(counts)}; there must be {problem.virtual_stages} entries of at "
            f"least 1 that sum to {total}"
        )
    places = [i for i, layer in enumerate(problem.layers) if layer.kind == "transformer"]
    return partition_at(problem, [0, *(places[end] for end in np.cumsum(counts)[:-1]), len(problem.layers)])


def partition_at(problem: PartitionProblem, cuts: Sequence[int], *, is_optimal: bool = False) -> Partition:
    """The partition with these cuts and its costs."""
    stage_s, link_s, memory = costs(problem, np.array([cuts]))
    counts = np.diff(problem.prefix["count"][np.array(cuts)])
    return Partition(
        cuts=tuple(int(cut) for cut in cuts),
        layers_per_part=tuple(int(count) for count in counts),
        stage_s=tuple(stage_s[0].tolist()),
        link_s=tuple(link_s[0].tolist()),
        memory_bytes=tuple(memory[0].tolist()),
        is_optimal=is_optimal,
    )


def costs(problem: PartitionProblem, cuts: Ints) -> tuple[Floats, Floats, Floats]:
    """Of many partitions, `cuts` (n, parts + 1): seconds of stages and of links, bytes of stages, each (n, stages)."""
    stages, parts = len(problem.stages), problem.virtual_stages
    stage_s, link_s, memory = (np.zeros((len(cuts), stages)) for _ in range(3))
    time = np.diff(problem.prefix["time"][cuts], axis=1)
    state = np.diff(problem.prefix["state"][cuts], axis=1)
    activation = np.diff(problem.prefix["activation"][cuts], axis=1)
    for part in range(parts):
        stage = part % stages
        stage_s[:, stage] += time[:, part] / problem.stages[stage].speed
        transfer = problem.transfer_s(part, cuts[:, part + 1])
        if problem.overlap_transfers:
            link_s[:, stage] += transfer
        else:
            stage_s[:, stage] += 2 * transfer
            stage_s[:, (part + 1) % stages] += 2 * transfer
    working = problem.working_bytes[cuts[:, :-1], cuts[:, 1:]]
    for stage in range(stages):
        held = activation[:, stage::stages] @ problem.moments(stage).T
        peak = working[:, stage::stages].max(axis=1)
        memory[:, stage] = state[:, stage::stages].sum(axis=1) + held.max(axis=1) + peak
    return stage_s, link_s, memory


def split_evenly(layers: int, stages: int) -> tuple[int, ...]:
    """`layers` over `stages`, as even as possible; the first stages get the odd ones. The result sums to `layers`.

    Raises ValueError where a stage would stay empty.
    """
    check_counts(layers, stages)
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def split_by_speed(layers: int, speeds: Sequence[float], alpha: float = PAPER_ALPHA) -> tuple[int, ...]:
    """The paper's rule: stage i of speed S_i gets floor(alpha * layers * S_i / sum of S), the last stage the rest.

    `speeds` in any one unit (the paper: TFLOP/s measured in each stage's network). Every stage gets at least one layer:
    a stage that the rule leaves empty gets one, and none takes what the later ones need. The result sums to `layers`.
    Raises ValueError where there are fewer layers than stages, or a speed or alpha is not positive and finite.
    """
    check_counts(layers, len(speeds))
    for name, value in [("alpha", alpha), *((f"speeds[{i}]", speed) for i, speed in enumerate(speeds))]:
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"{name}={value} must be positive and finite")
    counts: list[int] = []
    for stage, speed in enumerate(speeds[:-1]):
        # 1e-9: a product that is whole on paper must not lose a layer to rounding
        wanted = math.floor(alpha * layers * speed / sum(speeds) + 1e-9)
        available = layers - sum(counts) - (len(speeds) - stage - 1)
        counts.append(min(max(wanted, 1), available))
    return (*counts, layers - sum(counts))


def check_whole(**counts: int) -> None:
    """Raises ValueError naming the first that is no whole number: 15 / 2 layers, say, where 15 // 2 was meant."""
    for name, value in counts.items():
        if not isinstance(value, Integral):
            raise UsageError(f"{name}={value!r} must be a whole number (a / b is none in Python, a // b is)")


def check_counts(layers: int, stages: int) -> None:
    """Raises ValueError where `layers` cannot give every one of `stages` at least one."""
    check_whole(layers=layers, pipeline=stages)
    if stages < 1:
        raise UsageError(f"pipeline={stages} must be at least 1")
    if layers < stages:
        raise UsageError(
            f"{layers} layers cannot fill {stages} pipeline stages; use pipeline={max(layers, 1)} or fewer, "
            f"or a model of at least {stages} layers"
        )
