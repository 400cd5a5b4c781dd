"""Plan: the decision, frozen: sizes, clusters, groups with their NICs, layers per stage. A file a person can review."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes import files
from holmes.groups import KINDS, Group, check_tensor, make_grouping, possible_pipelines
from holmes.partition.rules import split_evenly
from holmes.topology import Cluster, Topology


@dataclass(frozen=True)
class Plan:
    """Which rank does what, over which NIC. Made by `plan_for`; the same on all ranks; saved as YAML or JSON."""

    world_size: int
    tensor: int
    data: int
    pipeline: int
    clusters: tuple[Cluster, ...]
    layers_per_stage: tuple[int, ...]
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if self.tensor * self.data * self.pipeline != self.world_size:
            raise ValueError(
                f"tensor={self.tensor} * data={self.data} * pipeline={self.pipeline} = "
                f"{self.tensor * self.data * self.pipeline}, but the plan has {self.world_size} ranks"
            )
        if len(self.layers_per_stage) != self.pipeline:
            raise ValueError(
                f"layers_per_stage={list(self.layers_per_stage)} must have pipeline={self.pipeline} entries"
            )
        for kind in KINDS:
            ranks = sorted(rank for group in self.groups if group.kind == kind for rank in group.ranks)
            if ranks != list(range(self.world_size)):
                raise ValueError(f"the {kind} groups must hold each of {self.world_size} ranks once, but hold {ranks}")

    def group_of(self, kind: str, rank: int) -> Group:
        """The "tp", "dp" or "pp" group of a rank. Raises ValueError for another kind or rank."""
        for group in self.groups:
            if group.kind == kind and rank in group.ranks:
                return group
        raise ValueError(f"no {kind!r} group of rank {rank}; kinds are {list(KINDS)}, ranks 0 to {self.world_size - 1}")

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of a rank, from 0."""
        return self.group_of("pp", rank).ranks.index(rank)

    def layers_of(self, stage: int) -> range:
        """The indices of the layers of a stage."""
        first = sum(self.layers_per_stage[:stage])
        return range(first, first + self.layers_per_stage[stage])

    def describe(self) -> str:
        """A few lines for people: sizes, clusters, and each group's ranks, NICs and reason."""
        lines = [
            f"{self.world_size} ranks = tensor {self.tensor} x data {self.data} x pipeline {self.pipeline}, "
            f"layers per stage {list(self.layers_per_stage)}"
        ]
        lines += [f"{c.name}: hosts {', '.join(c.hosts)}; ranks {list(c.ranks)}; {c.fabric}" for c in self.clusters]
        for group in self.groups:
            if len(group.ranks) > 1:
                nics = ", ".join(f"{rank}: {'+'.join(names)}" for rank, names in group.nics.items())
                lines.append(f"{group.kind} {list(group.ranks)}: {f'{nics}; ' if nics else ''}{group.reason}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and strings, with kind and version."""
        return {"kind": "holmes plan", "version": 1, **files.plain(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict`. Raises ValueError naming what is wrong."""
        files.check_kind(data, "holmes plan", version=1)
        fields = {key: value for key, value in data.items() if key not in ("kind", "version")}
        try:
            fields["clusters"] = tuple(
                Cluster(**{**entry, "hosts": tuple(entry["hosts"]), "ranks": tuple(entry["ranks"])})
                for entry in data["clusters"]
            )
            fields["groups"] = tuple(
                Group(**{**entry, "ranks": tuple(entry["ranks"]), "nics": _nics(entry["nics"])})
                for entry in data["groups"]
            )
            fields["layers_per_stage"] = tuple(data["layers_per_stage"])
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a plan: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes .yaml, .yml or .json."""
        files.save(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads what `save` wrote. Raises ValueError naming what is wrong."""
        return cls.from_dict(files.load(path))


def plan_for(
    topology: Topology,
    *,
    model_layers: int,
    pipeline: int | None = None,
    tensor: int = 1,
    layers_per_stage: Sequence[int] | None = None,
) -> Plan:
    """A plan for this topology. `pipeline=None`: as few stages as fit.

    `layers_per_stage`: transformer layers of each stage, in the order of the stages, as `holmes.partition` finds them
    (without interleaving); None: split evenly.

    Local and deterministic: equal on all ranks that have the same topology. Raises ValueError, with all numbers and the
    nearest fix, where sizes do not divide, layers do not suffice or sum up, or ranks of a group share no network.
    """
    if pipeline is None:
        check_tensor(topology, tensor)
        pipeline = min(possible_pipelines(topology, tensor))
    grouping = make_grouping(topology, tensor, pipeline)
    return Plan(
        world_size=topology.world_size,
        tensor=tensor,
        data=topology.world_size // (tensor * pipeline),
        pipeline=pipeline,
        clusters=topology.clusters,
        layers_per_stage=_checked(layers_per_stage, model_layers, pipeline),
        groups=grouping.groups,
    )


def _checked(layers_per_stage: Sequence[int] | None, model_layers: int, pipeline: int) -> tuple[int, ...]:
    if layers_per_stage is None:
        return split_evenly(model_layers, pipeline)
    counts = tuple(layers_per_stage)
    if len(counts) != pipeline or sum(counts) != model_layers or min(counts) < 0:
        raise ValueError(
            f"layers_per_stage={list(counts)} ({len(counts)} stages, {sum(counts)} layers) must be {pipeline} numbers, "
            f"none below 0, that sum to model_layers={model_layers}; for an even split: "
            f"{list(split_evenly(model_layers, pipeline))}"
        )
    return counts


def _nics(entry: Mapping[Any, Any]) -> dict[int, tuple[str, ...]]:
    return {int(rank): tuple(names) for rank, names in entry.items()}  # JSON keys are text
