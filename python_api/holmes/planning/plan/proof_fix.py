"""What would satisfy the proof: the same sizes with the ranks ordered, or the nearest sizes that fit."""

from __future__ import annotations

from collections.abc import Mapping

from holmes.cluster.topology import Topology
from holmes.planning.groups.sizes import Limits, Sizes, fixes, problems


def sizes_of(size_of: Mapping[str, int], world_size: int) -> Sizes:
    """The parallel sizes that groups of these sizes by kind were made with; kinds that are not there count as 1."""
    tensor, context = size_of.get("tp", 1), size_of.get("cp", 1)
    data = size_of.get("dp", 1)
    pipeline = size_of.get("pp") or max(world_size // (tensor * context * data), 1)
    experts = "ep" in size_of or "expt_tp" in size_of
    return Sizes(tensor, context, pipeline, size_of.get("ep", 1), size_of.get("expt_tp", 1) if experts else None)


def nearest_fix(topology: Topology, sizes: Sizes) -> str:
    """In words, for groups of these sizes."""
    limits = Limits.of(topology)
    if not problems(limits, sizes):
        return (
            f"these sizes fit ({sizes.text()}), in another order of ranks: holmes.plan_for(topology, {sizes.text()}, "
            "...) gives it"
        )
    return "; or ".join(fixes(topology, limits, sizes))
