"""Ranks in the plan's order from the start, for frameworks whose grid is the rank numbers themselves."""

from __future__ import annotations

import os
from dataclasses import replace

from holmes.planning.plan.plan import Plan
from holmes.training.integrations.requirements import NotExpressible
from holmes.words import short
from holmes_comm.errors import UsageError


def renumbered(plan: Plan) -> Plan:
    """The same plan for a job whose ranks are started in its order: what was rank `plan.order[i]` is rank i. Local."""
    place = plan.grid.place

    def renumber(ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(int(place[rank]) for rank in ranks))

    return replace(
        plan,
        order=tuple(range(plan.world_size)),
        hosts=tuple(replace(host, ranks=renumber(host.ranks)) for host in plan.hosts),
        clusters=tuple(replace(cluster, ranks=renumber(cluster.ranks)) for cluster in plan.clusters),
    )


def hosts_in_order(plan: Plan) -> list[tuple[str, int]]:
    """Hosts, and the ranks of each, to start one after the other so that ranks are numbered in the plan's order. Local.

    Raises NotExpressible where another host's ranks stand between those of a host (context groups over hosts).
    """
    host_of = {rank: host.name for host in plan.hosts for rank in host.ranks}
    runs: list[tuple[str, int]] = []
    for rank in plan.order:
        name = host_of[rank]
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + 1)
        else:
            runs.append((name, 1))
    if len(runs) > len(plan.hosts):
        twice = next(name for index, (name, _) in enumerate(runs) if name in dict(runs[:index]))
        raise NotExpressible(
            f"ranks of host {twice} stand apart in the plan's order {short(plan.order)}, so no order of hosts numbers "
            "ranks in it; number each rank by itself (start_in_plan_order, under torchrun)"
        )
    return runs


def start_in_plan_order(plan: Plan) -> Plan:
    """Gives this process the rank that it has in the plan's order and returns the plan for these numbers. Local.

    Call it on every rank before `init_process_group` (under torchrun; a plan from a file): it reads and sets the
    variable RANK, and leaves LOCAL_RANK, the device, as it is. Raises ValueError where RANK or WORLD_SIZE do not fit
    the plan, and where rank 0 would move away from the process at MASTER_ADDR that others connect to.
    """
    rank, size = (_number(name) for name in ("RANK", "WORLD_SIZE"))
    if size != plan.world_size or not 0 <= rank < size:
        raise UsageError(f"RANK={rank} of WORLD_SIZE={size} does not fit a plan for {plan.world_size} ranks")
    first = plan.order[0]
    # torchrun's agent serves the store; else the process that becomes rank 0 does, wherever it is.
    if first != 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UsageError(
            f"rank {first} becomes rank 0, which serves the store at MASTER_ADDR; start with torchrun, whose agent "
            f"serves it, or number the ranks in the plan's order yourself: {short(plan.order)}"
        )
    os.environ["RANK"] = str(int(plan.grid.place[rank]))
    return renumbered(plan)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdigit():
        raise UsageError(f"{name}={text!r} must be a number; start with torchrun, or set it on every rank")
    return int(text)
