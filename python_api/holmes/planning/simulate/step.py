"""One training step, ready to be simulated: what each stage computes, what crosses which link, and in which order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from holmes.planning.schedule import check_turns
from holmes.planning.simulate.schedules import check_sizes
from holmes_comm.errors import UsageError


@dataclass(frozen=True)
class Route:
    """Way of a transfer: link name to the copies of it that cross the link at once, and the latency of a message.

    Copies are equal transfers in lock-step: of the 8 ranks of a host that share its NIC, one is simulated, with 8
    copies. No links: only the latency counts. `cores`: shared processor to the core-seconds that each byte of all
    copies together costs on it, `core_s_per_byte`: of one rank.
    """

    copies: Mapping[str, float] = field(default_factory=dict)
    latency_s: float = 0.0
    cores: Mapping[str, float] = field(default_factory=dict)
    core_s_per_byte: float = 0.0

    @cached_property
    def usage(self) -> Mapping[str, float]:
        """All that a byte of the transfer takes."""
        return {**self.copies, **self.cores}


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, seen from one of its ranks; all data-parallel replicas run in lock-step.

    Times are of one micro-batch through the whole stage (all chunks). `reduce_bytes` and `gather_bytes` are what
    crosses each link of `data_route` (per copy) after the last backward and before the first forward. `sharding_s`:
    what the optimizer's hooks and buckets add to the last backward.
    """

    forward_s: float
    backward_s: float
    weight_share: float = 0.5  # of the backward that computes weight gradients, which zero-bubble schedules postpone
    dividing_s: float = 0.0  # what such a schedule's two parts take longer than one backward
    data_route: Route = Route()
    reduce_bytes: float = 0.0
    gather_bytes: float = 0.0
    optimizer_s: float = 0.0
    sharding_s: float = 0.0
    cores: Mapping[str, float] = field(default_factory=dict)  # shared processor: ranks of this stage on it


@dataclass(frozen=True)
class Boundary:
    """From one stage to the next (and from the last to the first, where stages have several chunks)."""

    forward_route: Route = Route()
    backward_route: Route = Route()
    size_bytes: float = 0.0  # activations of one micro-batch; their gradients are as large


@dataclass(frozen=True)
class Step:
    """A step lasts from one global gradient norm to the next: parameters are gathered, micro-batches run, gradients
    reduced; the optimizer waits for every stage, as clipping by the global norm demands. Without `global_norm` it
    waits for its own stage only.

    `overlap_reduce`: buckets go as soon as the last backward has made them, else all after it. `overlap_gather`: the
    first forward starts with its first bucket, else after the last one. `bucket_bytes` counts wire bytes.

    With `turns`, of so many pipelines each sends its messages over the links of a boundary before the next one does,
    with all of their rate: all are simulated, each with its part of a route's copies, and join for the gradients.

    `cores`: processors that ranks share, as `Engine` takes them; stages and routes without one have their own.
    """

    stages: tuple[Stage, ...]
    boundaries: tuple[Boundary, ...]
    links: Mapping[str, float]  # bytes per second
    micro_batches: int
    schedule: str = "1f1b"
    chunks: int = 1
    warmup: tuple[int, ...] | None = None  # as of `Plan`
    group: int | None = None  # its micro_batch_group
    turns: int | None = None  # so many pipelines that take turns; None: all replicas run in lock-step
    overlap_reduce: bool = False
    overlap_gather: bool = False
    bucket_bytes: float = math.inf
    embedding: Boundary | None = None  # sum of the embedding's gradients over the first and the last stage
    global_norm: bool = True
    cores: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_sizes(self.schedule, len(self.stages), self.micro_batches, self.chunks, self.warmup, self.group)
        wanted = len(self.stages) if self.chunks > 1 else len(self.stages) - 1
        if len(self.boundaries) != wanted:
            raise UsageError(
                f"{len(self.stages)} stages with {self.chunks} chunks need {wanted} boundaries, "
                f"not {len(self.boundaries)}"
            )
        check_turns(self.turns, len(self.stages))
        if not self.bucket_bytes > 0:
            raise UsageError(f"bucket_bytes={self.bucket_bytes} must be above 0")

    def buckets(self, size_bytes: float) -> int:
        """Buckets that one chunk's bytes are cut into; all are equal. 0 where there is nothing to send."""
        return max(math.ceil(size_bytes / self.chunks / self.bucket_bytes), 1) if size_bytes > 0 else 0
