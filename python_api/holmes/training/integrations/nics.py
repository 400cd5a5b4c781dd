"""The plan's NICs for process groups that a framework makes by itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from holmes.planning.groups.group import Group
from holmes.planning.plan.plan import Plan
from holmes_comm.errors import JobError, UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from holmes_comm import GroupOptions


@contextmanager
def planned_nics(plan: Plan) -> Iterator[None]:
    """While it is open, a group of the "holmes" backend made without pg_options uses the plan's NICs for its ranks.

    Local; after `init_process_group`; open it on every rank, around everything that makes groups (a trainer's main
    function, where it makes some late). Groups that the plan does not have, such as pairs for send and receive, use the
    fastest NIC that their members share, or what HOLMES_NICS says. Raises ValueError where the plan is for another
    number of ranks.
    """
    import torch.distributed as dist

    from holmes.training.process_groups import group_options
    from holmes_comm.torch_backend import group_options_from

    check_world_size(plan)
    rank = dist.get_rank()
    mine: dict[frozenset[int], Group] = {}
    for group in plan.groups_of(rank):
        known = mine.setdefault(frozenset(group.ranks), group)
        if (group.priority or 0) > (known.priority or 0):  # "mp" and "pp" are the same ranks where nothing is split
            mine[frozenset(group.ranks)] = group

    def choose(global_ranks: list[int]) -> GroupOptions | None:
        group = mine.get(frozenset(global_ranks))
        return None if group is None else group_options(group, rank)

    with group_options_from(choose):
        yield


def new_group(ranks: list[int] | None, **options: Any) -> ProcessGroup | None:
    """torch's `new_group` with the ranks in this order; torch sorts them unless told not to. Collective.

    Raises RuntimeError where this torch cannot be told.
    """
    import torch.distributed as dist

    if ranks is not None and ranks != sorted(ranks):
        if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
            raise JobError(
                f"the plan needs group {ranks} in this order, but this torch sorts ranks; use a torch whose new_group "
                "has sort_ranks (2.13 has), or start ranks in the plan's order (start_in_plan_order)"
            )
        options["sort_ranks"] = False
    group: ProcessGroup | None = dist.new_group(ranks, **options)
    return group


def check_world_size(plan: Plan) -> None:
    """Raises ValueError where the running job has another number of ranks than the plan."""
    import torch.distributed as dist

    if plan.world_size != (size := dist.get_world_size()):
        raise UsageError(f"the plan is for {plan.world_size} ranks, but this job has {size}; make a plan for this job")
