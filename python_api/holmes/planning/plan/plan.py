"""Plan: the decision, frozen: sizes, rank order, networks, layers per stage, schedule. A file a person can review."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np

from holmes import files
from holmes.cluster.topology import Cluster, Topology
from holmes.planning.groups.group import Group, Groups
from holmes.planning.groups.rank_grid import KINDS, RankGrid, check_kind, order_ranks, ordered_clusters
from holmes.planning.groups.reach import HostRanks, Network, Reach
from holmes.planning.groups.shares import (
    SPEED,
    check_shares,
    replica_speeds,
    share_unit,
    shares_by_speed,
    shares_reason,
    step_micro_batches,
)
from holmes.planning.groups.sizes import Limits, Sizes, batch_problem, check_sizes, problems
from holmes.planning.model.gpt import check_recomputation
from holmes.planning.partition.problem import split_evenly
from holmes.planning.schedule import check_group, check_schedule, check_turns, check_warmup
from holmes.words import short
from holmes_comm.errors import UsageError

SIZES = ("world_size", "tensor", "context", "data", "pipeline", "expert", "expert_tensor")
_NEED_A_NETWORK = ("tp_cp", "dp_cp", "pp", "tp_ep", "expt_dp")  # all other groups but tp_ep_pp follow from these


@dataclass(frozen=True)
class Plan:
    """Which rank does what, over which network. Made by `plan_for`; the same on all ranks; saved as YAML or JSON.

    `tensor`, `context`, `data` and `pipeline` multiply up to `world_size`; `expert` and `expert_tensor` share out the
    same ranks of a stage for the experts. `order[i]` is the rank at logical place i: tensor runs fastest, then context,
    data, pipeline. `layers_per_chunk[stage][chunk]`: transformer layers; chunk c of the model runs on stage c %
    pipeline. `hosts`, `clusters` and `networks` (best first) say where ranks are and what joins them; groups and their
    NICs follow and are made when asked for. `warmup`: forwards of each stage before its first backward, in "1f1b" and
    "zb-h1"; None: the fewest with which neighbours do not wait, `pipeline` - stage. `micro_batch_group`: in
    "interleaved", micro-batches that go through a chunk before the next one; None: `pipeline`. `micro_batch`,
    `global_batch`: samples; `data_shares`: micro-batches of a step for each data-parallel index, where replicas are not
    equally fast; None: equally many; `turns`: so many pipelines take turns on what joins the clusters, that of data
    index d number d % `turns` (docs/wan.md); None: they share it; `model`: sizes of the model, such as layers, hidden,
    heads, sequence, vocabulary; `recomputation`: "none", "selective" (attention's scores) or "full" (whole layers);
    None where the plan does not say. `reasons`: why, in lines.
    """

    world_size: int
    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int
    layers_per_chunk: tuple[tuple[int, ...], ...]
    schedule: str
    order: tuple[int, ...]
    hosts: tuple[HostRanks, ...]
    clusters: tuple[Cluster, ...]
    networks: tuple[Network, ...]
    micro_batch: int | None = None
    global_batch: int | None = None
    model: Mapping[str, int] | None = None
    reasons: tuple[str, ...] = ()
    recomputation: str | None = None
    warmup: tuple[int, ...] | None = None
    micro_batch_group: int | None = None
    turns: int | None = None
    data_shares: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.recomputation is not None:
            check_recomputation(self.recomputation)
        for name in (*SIZES, "micro_batch", "global_batch"):
            value = getattr(self, name)
            may_lack = value is None and name not in SIZES
            if not may_lack and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
                raise UsageError(f"{name}={value!r} must be a whole number of at least 1")
        product = self.tensor * self.context * self.data * self.pipeline
        if product != self.world_size:
            raise UsageError(
                f"tensor={self.tensor} * context={self.context} * data={self.data} * pipeline={self.pipeline} = "
                f"{product}, but the plan has {self.world_size} ranks"
            )
        width = self.tensor * self.context * self.data
        if width % (self.expert * self.expert_tensor):
            raise UsageError(
                f"expert={self.expert} * expert_tensor={self.expert_tensor} must divide the {width} ranks of a stage"
            )
        chunks = {len(layers) for layers in self.layers_per_chunk}
        if len(self.layers_per_chunk) != self.pipeline or len(chunks) != 1:
            raise UsageError(
                f"layers_per_chunk={[list(layers) for layers in self.layers_per_chunk]} must have "
                f"pipeline={self.pipeline} entries, equally many chunks in each"
            )
        check_schedule(self.schedule, self.chunks)
        check_warmup(self.schedule, self.warmup, self.pipeline)
        check_group(self.schedule, self.micro_batch_group, self.pipeline)
        check_turns(self.turns, self.pipeline, self.data)
        self._check_batch()
        layers, planned = sum(self.layers_per_stage), (self.model or {}).get("layers")
        if planned not in (None, layers):
            raise UsageError(
                f"layers_per_chunk={[list(layers) for layers in self.layers_per_chunk]} has {layers} layers, but the "
                f"plan's model has {planned}; plan again, or mend the file"
            )
        members = {"order": self.order}
        members |= {"hosts": tuple(rank for host in self.hosts for rank in host.ranks)}
        members |= {"clusters": tuple(rank for cluster in self.clusters for rank in cluster.ranks)}
        for name, ranks in members.items():
            if not np.array_equal(np.sort(np.asarray(ranks)), np.arange(self.world_size)):
                raise UsageError(f"{name} must hold each of {self.world_size} ranks once, but holds {short(ranks)}")

    def _check_batch(self) -> None:
        if self.data_shares is not None:
            check_shares(
                self.data_shares,
                self.data,
                global_batch=self.global_batch,
                micro_batch=self.micro_batch,
                schedule=self.schedule,
                pipeline=self.pipeline,
                group=self.micro_batch_group,
            )
            if self.tensor * self.context % (self.expert * self.expert_tensor):
                raise UsageError(
                    f"data_shares={short(self.data_shares)}, but expert={self.expert} * expert_tensor="
                    f"{self.expert_tensor} ranks exchange tokens, of several replicas, which must run equally many "
                    f"micro-batches: leave data_shares out, or give sizes that divide tensor * context = "
                    f"{self.tensor * self.context}"
                )
        elif self.global_batch is not None:
            wrong = batch_problem(
                self.global_batch, self.micro_batch, self.data, self.pipeline, self.chunks, self.schedule
            )
            if wrong:
                raise UsageError(f"{wrong[0]}; the nearest is global_batch={wrong[1]}")
            check_group(self.schedule, self.micro_batch_group, self.pipeline, self.micro_batches)

    @property
    def chunks(self) -> int:
        """Parts of the model on each stage; above 1 with the interleaved schedule."""
        return len(self.layers_per_chunk[0])

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Transformer layers of each stage, all its chunks."""
        return tuple(sum(layers) for layers in self.layers_per_chunk)

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.tensor * self.context * self.data // (self.expert * self.expert_tensor)

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of a step through each replica; None where the plan does not say. Raises ValueError where
        replicas have different numbers: see `micro_batches_of`."""
        if self.has_uneven_shares:
            raise UsageError(
                f"data_shares={short(self.data_shares or ())}: replicas run different numbers of micro-batches; ask "
                "for a rank's, plan.micro_batches_of(rank)"
            )
        if self.data_shares is not None:
            return self.data_shares[0]
        if self.global_batch is None or self.micro_batch is None:
            return None
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def has_uneven_shares(self) -> bool:
        """Whether replicas run different numbers of micro-batches."""
        return len(set(self.data_shares or ())) > 1

    def micro_batches_of(self, rank: int) -> int | None:
        """Micro-batches of a step through a rank's replica; None where the plan does not say."""
        replica = self._replica_of(rank)
        return self.micro_batches if self.data_shares is None else self.data_shares[replica]

    def gradient_weight(self, rank: int) -> float:
        """What a rank's gradient, that of the mean over its replica's samples, counts in the mean over data-parallel
        ranks so that this is the mean over the global batch: share * data / all shares; 1 with equal shares."""
        shares = self.data_shares or (1,) * self.data
        return shares[self._replica_of(rank)] * self.data / sum(shares)

    def samples_of(self, rank: int) -> range:
        """Which samples of the global batch, from 0, a rank's replica takes. Raises ValueError where the plan says no
        global batch."""
        if self.global_batch is None:
            raise UsageError("the plan does not say its global_batch; plan_for(global_batch=...) gives one")
        replica, shares = self._replica_of(rank), self.data_shares or (1,) * self.data
        unit = self.global_batch // sum(shares)
        first = sum(shares[:replica]) * unit
        return range(first, first + shares[replica] * unit)

    def _replica_of(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise UsageError(f"the plan has no rank {rank}; its ranks are 0 to {self.world_size - 1}")
        return int(self.grid.coordinates_of(rank)["dp"])

    @cached_property
    def grid(self) -> RankGrid:
        """The ranks by place along each axis."""
        return RankGrid(
            self.order,
            tensor=self.tensor,
            context=self.context,
            data=self.data,
            pipeline=self.pipeline,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
        )

    @cached_property
    def reach(self) -> Reach:
        """Where ranks are, and what their hosts share."""
        return Reach(self.hosts, self.clusters, self.networks, self.world_size)

    @cached_property
    def _groups(self) -> dict[str, Groups]:
        return {}

    def groups(self, kind: str) -> Groups:
        """All groups of a kind ("tp", "dp", "pp", ...: see docs/groups.md). Raises ValueError listing the kinds."""
        check_kind(kind)
        if kind not in self._groups:
            self._groups[kind] = Groups(kind, self.grid, self.reach, self.turns)
        return self._groups[kind]

    def group_of(self, kind: str, rank: int) -> Group:
        """The group of this kind that a rank is in. Raises ValueError for another kind or rank, and where it is in none
        (embedding groups hold the first and last stage only)."""
        check_kind(kind)
        if not 0 <= rank < self.world_size:
            raise UsageError(f"no {kind!r} group of rank {rank}; ranks are 0 to {self.world_size - 1}")
        row = self.grid.row_of(kind, rank)
        if row is None:
            raise UsageError(
                f"rank {rank} is in no {kind!r} group: those hold the {KINDS[kind].stages} stage of {self.pipeline}, "
                f"and it is on stage {self.stage_of(rank)}, counted from 0"
            )
        return self.groups(kind)[row]

    def groups_of(self, rank: int) -> Iterator[Group]:
        """All groups of a rank, one of each kind that it is in. Raises ValueError for another rank."""
        if not 0 <= rank < self.world_size:
            raise UsageError(f"the plan has no rank {rank}; its ranks are 0 to {self.world_size - 1}")
        return (self.group_of(kind, rank) for kind in KINDS if self.grid.row_of(kind, rank) is not None)

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of a rank, from 0."""
        return self.grid.stage_of(rank)

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """The ranks of a pipeline stage, in logical order."""
        width = self.grid.width
        return self.order[stage * width : (stage + 1) * width]

    def layers_of(self, stage: int, chunk: int | None = None) -> range:
        """The indices of the layers of a stage, or of one of its chunks. Raises ValueError where the stage has several
        chunks and none is named."""
        if chunk is None and self.chunks > 1:
            raise UsageError(f"each stage has {self.chunks} chunks; say which one, 0 to {self.chunks - 1}")
        part = (chunk or 0) * self.pipeline + stage
        first = sum(self.layers_per_part[:part])
        return range(first, first + self.layers_per_part[part])

    @property
    def layers_per_part(self) -> tuple[int, ...]:
        """Transformer layers of each part of the model, in model order: stages times chunks."""
        return tuple(layers[chunk] for chunk in range(self.chunks) for layers in self.layers_per_chunk)

    def describe(self) -> str:
        """A few lines for people: sizes, clusters, and the groups' ranks, NICs and reasons."""
        from holmes.planning.plan.file import describe

        return describe(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and strings, with kind and version."""
        from holmes.planning.plan.file import to_dict

        return to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict`. Raises ValueError naming what is wrong."""
        from holmes.planning.plan.file import from_dict

        return from_dict(data)

    def save(self, path: str | Path) -> None:
        """Writes .yaml, .yml or .json."""
        files.save(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads what `save` wrote. Raises ValueError naming the file and what is wrong."""
        return files.load_as(path, cls.from_dict)


def plan_for(
    topology: Topology,
    *,
    model_layers: int,
    pipeline: int | None = None,
    tensor: int = 1,
    context: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
    layers_per_stage: Sequence[int] | None = None,
    layers_per_chunk: Sequence[Sequence[int]] | None = None,
    chunks: int | None = None,
    schedule: str | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    model: Mapping[str, int] | None = None,
    cluster_order: Sequence[str] | None = None,
    span_clusters: bool = False,
    reasons: Sequence[str] = (),
    warmup: Sequence[int] | None = None,
    micro_batch_group: int | None = None,
    turns: int | None = None,
    data_shares: Sequence[int] | Literal["speed"] | None = None,
) -> Plan:
    """A plan for this topology. `pipeline=None`: as few stages as fit.

    Every stage lies inside one cluster (a cluster may hold several), every tensor group inside one host, context groups
    inside one where they fit; the data-parallel size is what is left. `expert_tensor` None: as `tensor`.

    `layers_per_stage`: transformer layers of each stage, in the order of the stages, as `holmes.partition` finds them;
    with `chunks` > 1 (interleaving) `layers_per_chunk[stage][chunk]` instead. None: split evenly. `schedule` None:
    "interleaved" with chunks, else "1f1b". `cluster_order`: names of the clusters, first stage first; None: by lowest
    rank. `span_clusters`: lets stages span clusters, for comparison or where nothing else fits; `holmes.check` then
    says what it costs. `data_shares`: as of `Plan`, or "speed": such that the slowest replica is done soonest, by the
    speeds of the topology's GPUs and the layers of each stage. The rest is carried along.

    Local and deterministic: equal on all ranks that have the same topology. Raises one ValueError, with all numbers and
    the nearest fix, where sizes do not fit, layers do not suffice or sum up, ranks of a group share no network, or a
    GPU's speed is needed and not known.
    """
    whole = {"model_layers": model_layers, "pipeline": pipeline, "tensor": tensor, "context": context, "expert": expert}
    whole |= {"expert_tensor": expert_tensor, "chunks": chunks}
    whole |= {"micro_batch": micro_batch, "global_batch": global_batch}
    for name, value in whole.items():
        if value is not None and not isinstance(value, Integral):
            raise UsageError(f"{name}={value!r} must be a whole number")
    chunks = chunks if chunks is not None else (1 if layers_per_chunk is None else len(layers_per_chunk[0]))
    schedule = schedule or ("interleaved" if chunks > 1 else "1f1b")
    check_schedule(schedule, chunks)
    clusters = ordered_clusters(topology, cluster_order)
    if not (data_shares is None or isinstance(data_shares, (tuple, list)) or str(data_shares) == SPEED):
        raise UsageError(f"data_shares={data_shares!r} must be {SPEED!r}, or the micro-batches of each replica")
    # With shares of its own for each replica the batch need not divide by them: the plan checks it.
    divided = global_batch if data_shares is None else None
    limits = Limits.of(topology, model_layers, micro_batch, divided, span_clusters)
    sizes = Sizes(tensor, context, pipeline or 0, expert, expert_tensor, chunks)
    if pipeline is None:
        sizes = _fewest_stages(limits, sizes)
    check_sizes(topology, limits, sizes)
    layers = _layers(model_layers, sizes, layers_per_stage, layers_per_chunk)
    order = order_ranks(topology, clusters, tensor=tensor, context=context, expert_tensor=sizes.expert_tensor_size)
    data = topology.world_size // (tensor * context * sizes.pipeline)
    shares = None if data_shares is None or isinstance(data_shares, str) else tuple(data_shares)
    if data_shares == SPEED:
        grid = RankGrid(order, tensor=tensor, context=context, data=data, pipeline=sizes.pipeline)
        speeds = replica_speeds(topology, grid, [sum(each) for each in layers])
        unit = share_unit(schedule, sizes.pipeline, micro_batch_group)
        shares = shares_by_speed(step_micro_batches(global_batch, micro_batch, data, unit), speeds, unit)
        reasons = [*reasons, shares_reason(shares, speeds)]
    plan = Plan(
        world_size=topology.world_size,
        tensor=tensor,
        context=context,
        data=data,
        pipeline=sizes.pipeline,
        expert=expert,
        expert_tensor=sizes.expert_tensor_size,
        layers_per_chunk=layers,
        schedule=schedule,
        order=order,
        hosts=tuple(HostRanks(host.name, host.ranks) for host in topology.hosts),
        clusters=topology.clusters,
        networks=Reach.of_topology(topology).networks,
        micro_batch=micro_batch,
        global_batch=global_batch,
        model=None if model is None else dict(model),
        reasons=tuple(reasons),
        warmup=None if warmup is None else tuple(warmup),
        micro_batch_group=micro_batch_group,
        turns=turns,
        data_shares=shares,
    )
    for kind in _NEED_A_NETWORK:
        plan.groups(kind).check_networks()
    return plan


def _fewest_stages(limits: Limits, sizes: Sizes) -> Sizes:
    widths = limits.stage_widths() or [limits.stage_unit]
    options = [replace(sizes, pipeline=limits.world_size // width) for width in widths]
    return next((option for option in options if not problems(limits, option)), options[0])


def _layers(
    model_layers: int,
    sizes: Sizes,
    layers_per_stage: Sequence[int] | None,
    layers_per_chunk: Sequence[Sequence[int]] | None,
) -> tuple[tuple[int, ...], ...]:
    parts = split_evenly(model_layers, sizes.pipeline * sizes.chunks)
    even = tuple(parts[stage :: sizes.pipeline] for stage in range(sizes.pipeline))
    if layers_per_chunk is not None and layers_per_stage is not None:
        raise UsageError("give layers_per_stage or layers_per_chunk, not both")
    if layers_per_stage is None and layers_per_chunk is None:
        return even
    name = "layers_per_stage" if layers_per_chunk is None else "layers_per_chunk"
    counts = tuple((count,) for count in layers_per_stage or ()) if layers_per_chunk is None else layers_per_chunk
    found = tuple(tuple(layers) for layers in counts)
    flat = [count for layers in found for count in layers]
    shape = {len(layers) for layers in found}
    if len(found) != sizes.pipeline or shape != {sizes.chunks} or sum(flat) != model_layers or min(flat) < 0:
        given = flat if layers_per_chunk is None else files.plain(found)
        wanted = f"{sizes.pipeline} numbers" if sizes.chunks == 1 else f"{sizes.pipeline} times {sizes.chunks} numbers"
        raise UsageError(
            f"{name}={given} ({len(found)} stages, {sum(flat)} layers) must be {wanted}, none below 0, that sum to "
            f"model_layers={model_layers}; for an even split: {list(parts) if sizes.chunks == 1 else files.plain(even)}"
        )
    return found
