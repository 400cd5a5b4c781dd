"""A training job (model, sizes, where the stages are, what the framework does), also of a plan, and its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from holmes.cluster.topology import Topology
from holmes.planning.groups.reach import Reach
from holmes.planning.groups.shares import check_shares, share_unit, shares_by_speed, stage_tflops
from holmes.planning.groups.sizes import batch_problem
from holmes.planning.model.gpt import PartTimes, Transformer, check_recomputation
from holmes.planning.plan.plan import Plan
from holmes.planning.plan.proof import plan_differs
from holmes.planning.schedule import check_turns
from holmes.planning.simulate.rates import Rates
from holmes.planning.simulate.schedules import check_sizes
from holmes.planning.simulate.step import Boundary, Route, Stage, Step
from holmes_comm.errors import UsageError

#: How gradients become new parameters: how often gradients cross a ring's link after the backward, and parameters
#: before the forward, each (n - 1) / n of them.
SYNCHRONIZATIONS = {
    "all_reduce": (2, 0),
    "sharded": (1, 1),  # reduce-scatter, each rank updates its shard, all-gather
    "all_reduce_sharded": (2, 1),  # all-reduce, each rank updates its shard, all-gather
}

SHARED_CORES = "cores"  # name of the processor that all ranks share, where they do


@dataclass(frozen=True)
class Framework:
    """What a training framework does in a step, apart from its choice of NICs."""

    synchronization: str = "all_reduce"
    overlap_reduce: bool = False
    overlap_gather: bool = False
    bucket_bytes: float = 256 * 2.0**20  # of gradients, as they are held
    element_bytes: int = 2  # of gradients, parameters and activations on the wire
    recomputation: str = "full"  # "none", "selective" (attention's scores) or "full" (whole layers)
    tied_embedding: bool = True  # first and last stage sum a tied word embedding's gradients
    global_norm: bool = True  # every stage's optimizer waits for all gradients, as clipping demands

    def __post_init__(self) -> None:
        check_recomputation(self.recomputation)
        if self.synchronization not in SYNCHRONIZATIONS:
            raise UsageError(
                f"synchronization={self.synchronization!r} is unknown; known are {', '.join(SYNCHRONIZATIONS)}"
            )


@dataclass(frozen=True)
class Place:
    """Where a stage runs: `hosts` equal hosts with `ranks_per_host` ranks of it each.

    `data_nic` and `pipeline_nic` are NIC classes (or names) in `Rates`, and need a rate only where a group leaves its
    host; `host` names the first host: stages on one host share its NICs. `speed` of its GPUs is relative to `Rates`;
    where replicas differ, `Job.speeds` says it of each.
    Stages of one `cluster` send to each other over its `cluster_nic`; None: over `pipeline_nic` as to all others.
    """

    host: str
    hosts: int
    ranks_per_host: int
    data_nic: str
    pipeline_nic: str
    speed: float = 1.0
    cluster: str | None = None
    cluster_nic: str | None = None

    def nic_to(self, other: Place) -> str:
        """The NIC that carries what goes to a stage elsewhere."""
        together = self.cluster is not None and self.cluster == other.cluster
        return self.cluster_nic if together and self.cluster_nic is not None else self.pipeline_nic


class Replica(NamedTuple):
    """A data-parallel replica: micro-batches of a step through it, and the speeds of its stages."""

    micro_batches: int
    speeds: tuple[float, ...]


@dataclass(frozen=True)
class Job:
    """One training job. `layers_per_stage[s]` layers run at `places[s]`; all stages have equally many ranks.

    Replicas may differ: `shares[r]` micro-batches run through replica r (None: equally many), whose stages have
    `speeds[r]` relative to `Rates` (None: their places' own).
    """

    model: Transformer
    layers_per_stage: tuple[int, ...]
    places: tuple[Place, ...]
    framework: Framework
    micro_batch: int
    global_batch: int
    tensor: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    warmup: tuple[int, ...] | None = None  # as of `Plan`
    group: int | None = None  # its micro_batch_group
    turns: int | None = None
    shares: tuple[int, ...] | None = None  # its data_shares
    speeds: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        for name in ("micro_batch", "global_batch", "tensor"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} must be at least 1")
        ranks = {place.hosts * place.ranks_per_host for place in self.places}
        if len(self.places) != len(self.layers_per_stage) or len(ranks) != 1:
            raise UsageError(
                f"{len(self.layers_per_stage)} stages need as many places with equally many ranks; "
                f"got places with {[place.hosts * place.ranks_per_host for place in self.places]} ranks"
            )
        if sum(self.layers_per_stage) != self.model.layers or min(self.layers_per_stage) < 1:
            raise UsageError(
                f"layers_per_stage={list(self.layers_per_stage)} must sum to {self.model.layers}, all above 0"
            )
        if self.chunks > min(self.layers_per_stage):
            raise UsageError(
                f"chunks={self.chunks} of a stage need a layer each, but a stage has {min(self.layers_per_stage)}"
            )
        for place in self.places:
            if place.ranks_per_host % self.tensor:
                raise UsageError(f"tensor={self.tensor} must divide the {place.ranks_per_host} ranks of {place.host}")
        check_turns(self.turns, len(self.places), self.data)
        if self.shares is not None:
            check_shares(self.shares, self.data, global_batch=self.global_batch, micro_batch=self.micro_batch)
        elif wrong := batch_problem(self.global_batch, self.micro_batch, self.data):
            raise UsageError(f"{wrong[0]}; the nearest is {wrong[1]}")
        if self.speeds is not None and {len(each) for each in self.speeds} != {len(self.places)}:
            raise UsageError(f"speeds={self.speeds} must have {self.data} rows of {len(self.places)} stages' speeds")

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.places[0].hosts * self.places[0].ranks_per_host // self.tensor

    @property
    def gpus(self) -> int:
        """Ranks of all stages."""
        return sum(place.hosts * place.ranks_per_host for place in self.places)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step through the slowest replica."""
        return self.slowest.micro_batches

    @cached_property
    def replicas(self) -> tuple[Replica, ...]:
        """All that differ."""
        shares = self.shares or (self.global_batch // (self.data * self.micro_batch),) * self.data
        speeds = self.speeds or (tuple(place.speed for place in self.places),) * self.data
        return tuple(dict.fromkeys(map(Replica, shares, speeds)))

    @cached_property
    def slowest(self) -> Replica:
        """The replica whose layers take longest, for which all others wait with their gradients."""

        def busy(replica: Replica) -> float:
            slots = [count / speed for count, speed in zip(self.layers_per_stage, replica.speeds, strict=True)]
            return sum(slots) + (replica.micro_batches - 1) * max(slots)

        return max(self.replicas, key=busy)

    def with_equal_shares(self) -> Job:
        """The same batch with shares as even as the schedule allows."""
        unit = share_unit(self.schedule, len(self.places), self.group) if self.schedule == "interleaved" else 1
        total = self.global_batch // self.micro_batch
        return replace(self, shares=shares_by_speed(total, [1.0] * self.data, unit))

    @property
    def flops_per_sample(self) -> float:
        """By the model's formula."""
        return self.model.flops_per_sample(self.framework.recomputation)


def make_step(job: Job, rates: Rates) -> Step:
    """The step of a job at these rates: of its slowest replica, where they differ. Raises ValueError where a NIC has no
    rate, or times are of another shape."""
    stages = len(job.places)
    for replica in job.replicas:
        check_sizes(job.schedule, stages, replica.micro_batches, job.chunks, job.warmup, job.group)
    pairs = [(i, (i + 1) % stages) for i in range(stages if job.chunks > 1 else stages - 1)]
    nics = {(place.host, place.data_nic) for place in job.places if place.hosts > 1}
    for a, b in [*pairs, (0, stages - 1)]:
        one, other = job.places[a], job.places[b]
        if one.host != other.host:
            nics |= {(one.host, one.nic_to(other)), (other.host, other.nic_to(one))}
    links = {f"{host} {nic} {way}": rates.link(nic).bytes_per_s for host, nic in sorted(nics) for way in ("out", "in")}
    activation_bytes = (
        job.micro_batch * job.model.sequence * job.model.hidden * job.framework.element_bytes / job.tensor
    )
    embedding = None
    if stages > 1 and job.framework.tied_embedding and job.model.tied:
        # An all-reduce of two ranks sends each way once what one rank holds.
        shard_bytes = job.model.head_parameters / job.tensor * job.framework.element_bytes
        embedding = _boundary(job, rates, 0, stages - 1, shard_bytes)
    reduces, gathers = SYNCHRONIZATIONS[job.framework.synchronization]
    wire_share = max(reduces, gathers) * (job.data - 1) / job.data if job.data > 1 else 1.0
    times, plain = (
        rates.times(job.model, job.micro_batch, job.tensor, recomputation)
        for recomputation in (job.framework.recomputation, "none")
    )
    return Step(
        stages=tuple(_stage(job, rates, times, plain, i) for i in range(stages)),
        boundaries=tuple(_boundary(job, rates, a, b, activation_bytes) for a, b in pairs),
        links=links,
        micro_batches=job.micro_batches,
        schedule=job.schedule,
        chunks=job.chunks,
        warmup=job.warmup,
        group=job.group,
        turns=job.turns,
        overlap_reduce=job.framework.overlap_reduce,
        overlap_gather=job.framework.overlap_gather,
        bucket_bytes=job.framework.bucket_bytes * wire_share,
        embedding=embedding,
        global_norm=job.framework.global_norm,
        cores={SHARED_CORES: rates.cores} if rates.cores else {},
    )


def _stage(job: Job, rates: Rates, times: PartTimes, plain: PartTimes, index: int) -> Stage:
    """`plain`: the times without recomputation."""
    model, framework, place = job.model, job.framework, job.places[index]
    speed = job.slowest.speeds[index]
    passes = times.scaled(1 / speed).stage(job.layers_per_stage, index)
    weights_s = plain.scaled(1 / speed).stage(job.layers_per_stage, index).backward_s / 2
    parameters = model.stage_parameters(job.layers_per_stage, index) / job.tensor
    wire_bytes = parameters * framework.element_bytes * (job.data - 1) / job.data
    reduces, gathers = SYNCHRONIZATIONS[framework.synchronization]
    route = Route()
    if place.hosts > 1:  # inside a host no NIC is used
        # A ring enters and leaves each host once; there is one ring for each tensor-parallel rank.
        copies = {f"{place.host} {place.data_nic} {way}": float(job.tensor) for way in ("out", "in")}
        link, messages = rates.link(place.data_nic), (job.data - 1) * max(reduces, gathers)
        ranks = place.hosts * place.ranks_per_host
        route = _priced(Route(copies, link.message_s * messages), rates, place.data_nic, ranks)
    return Stage(
        forward_s=passes.forward_s,
        backward_s=passes.backward_s,
        weight_share=weights_s / passes.backward_s,  # half of a backward without recomputation
        data_route=route,
        reduce_bytes=wire_bytes * reduces if job.data > 1 else 0.0,
        gather_bytes=wire_bytes * gathers if job.data > 1 else 0.0,
        optimizer_s=rates.optimizer_s_per_parameter * parameters / (job.data if gathers else 1),
        sharding_s=rates.sharding_s_per_parameter * parameters if gathers and framework.overlap_reduce else 0.0,
        cores={SHARED_CORES: float(place.hosts * place.ranks_per_host)} if rates.cores else {},
    )


def _priced(route: Route, rates: Rates, nic: str, ranks: int) -> Route:
    """With the processor time that each byte costs, where so many ranks send and receive it on shared cores at once."""
    core_s_per_byte = rates.link(nic).core_s_per_gb * 1e-9
    if not (rates.cores and core_s_per_byte > 0):
        return route
    return replace(route, cores={SHARED_CORES: core_s_per_byte * ranks}, core_s_per_byte=core_s_per_byte)


def _boundary(job: Job, rates: Rates, a: int, b: int, size_bytes: float) -> Boundary:
    source, target = job.places[a], job.places[b]
    return Boundary(_route(source, target, rates), _route(target, source, rates), size_bytes)


def _route(source: Place, target: Place, rates: Rates) -> Route:
    """From a rank's host to its peer's; all ranks of both hosts send at once. Inside a host no NIC is used."""
    if source.host == target.host:
        return Route()
    out, into = source.nic_to(target), target.nic_to(source)
    copies: Mapping[str, float] = {
        f"{source.host} {out} out": float(source.ranks_per_host),
        f"{target.host} {into} in": float(target.ranks_per_host),
    }
    latency_s = max(rates.link(out).message_s, rates.link(into).message_s)
    # Its sender and its receiver together do what one rank does that sends and receives.
    return _priced(Route(copies, latency_s), rates, out, source.hosts * source.ranks_per_host)


def job_of_plan(
    plan: Plan,
    topology: Topology,
    model: Transformer,
    framework: Framework,
    *,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
) -> Job:
    """The job that runs this plan. Local. NICs count by class: a host's rails of one class together have its rate.
    Where the topology says the speed of every GPU, rates are those of the fastest, and others take as much longer.

    What is None is as the plan says, micro-batches of one sample where it says nothing. Raises ValueError where the
    plan is for another topology, where no global batch is known, where the hosts of a stage have different numbers of
    its ranks, and as `Job` does.
    """
    for _, _, _, problem in plan_differs(plan, topology, Reach.of_topology(topology)):
        raise UsageError(f"the plan does not fit the topology: {problem}; make a plan for this topology")
    global_batch = plan.global_batch if global_batch is None else global_batch
    if global_batch is None:
        raise UsageError("the plan does not say its global_batch; pass global_batch=, the samples of a step")
    schedule = schedule or plan.schedule
    return Job(
        model=model,
        layers_per_stage=plan.layers_per_stage,
        places=tuple(_place(plan, topology, stage) for stage in range(plan.pipeline)),
        framework=framework,
        micro_batch=plan.micro_batch or 1 if micro_batch is None else micro_batch,
        global_batch=global_batch,
        tensor=plan.tensor,
        schedule=schedule,
        chunks=plan.chunks if chunks is None else chunks,
        warmup=plan.warmup if schedule == plan.schedule else None,
        group=plan.micro_batch_group if schedule == plan.schedule else None,
        turns=plan.turns,
        shares=plan.data_shares,
        speeds=_speeds(plan, topology),
    )


def _speeds(plan: Plan, topology: Topology) -> tuple[tuple[float, ...], ...] | None:
    """Of each replica's stages, relative to the fastest GPU; None where all are alike, or one is not known."""
    tflops = stage_tflops(topology, plan.grid)
    if tflops is None or tflops.min() == tflops.max():
        return None
    return tuple(map(tuple, (tflops / tflops.max()).tolist()))


def _place(plan: Plan, topology: Topology, stage: int) -> Place:
    ranks = plan.ranks_of_stage(stage)
    counts: dict[str, int] = {}
    for rank in ranks:
        name = topology.host_of(rank).name
        counts[name] = counts.get(name, 0) + 1
    if len(set(counts.values())) != 1:
        raise UsageError(
            f"the simulator needs equally many ranks of stage {stage} on each host, but there are {counts}"
        )
    first = ranks[0]
    cluster = topology.cluster_of(first)
    return Place(
        host=next(iter(counts)),
        hosts=len(counts),
        ranks_per_host=counts[next(iter(counts))],
        data_nic=plan.group_of("dp", first).nic_class or "none",
        pipeline_nic=plan.group_of("pp", first).nic_class or "none",
        cluster=cluster.name,
        cluster_nic=cluster.nic_class,
    )
