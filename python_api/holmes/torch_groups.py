"""Plan -> torch.distributed process groups, each on its planned NICs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from holmes.groups import Group
from holmes.plan import Plan

KINDS = ("tp", "dp", "pp")


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's groups. Rank order in a group is the plan's: in `pp`, group rank = stage."""

    tp: dist.ProcessGroup
    dp: dist.ProcessGroup
    pp: dist.ProcessGroup


def process_groups(plan: Plan, backend: str = "holmes") -> ProcessGroups:
    """Collective over the default group. Creates all groups of the plan, in the same order on every rank.

    Backend "holmes" puts each group on its planned NICs; any other backend (for comparison) chooses by itself.
    Raises ValueError where the plan is for another number of ranks.
    """
    if plan.world_size != (size := dist.get_world_size()):
        raise ValueError(f"the plan is for {plan.world_size} ranks, but this job has {size}; make a plan for this job")
    rank = dist.get_rank()
    keep_order = _keep_order(plan)
    mine: dict[str, dist.ProcessGroup] = {}
    for index, group in enumerate(group for kind in KINDS for group in plan.groups(kind)):
        handle = dist.new_group(
            list(group.ranks),
            backend=backend,
            pg_options=_options(group, rank) if backend == "holmes" and rank in group.ranks else None,
            group_desc=f"{group.kind}{index}",
            **keep_order,
        )
        if rank in group.ranks:
            mine[group.kind] = handle
    return ProcessGroups(**{kind: mine[kind] for kind in KINDS})


def _options(group: Group, rank: int) -> Any:
    from holmes_comm import NicSelection

    return NicSelection(names=group.nics.get(rank, ()))


def _keep_order(plan: Plan) -> dict[str, Any]:
    """torch sorts the ranks of a group unless told not to, and older releases cannot be told."""
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        return {"sort_ranks": False}
    unsorted = [
        list(group.ranks) for kind in KINDS for group in plan.groups(kind) if list(group.ranks) != sorted(group.ranks)
    ]
    if unsorted:
        raise RuntimeError(
            f"the plan needs group {unsorted[0]} in this order, but this torch sorts ranks; "
            "use a torch whose new_group has sort_ranks (2.13 has), or start ranks cluster by cluster"
        )
    return {}
