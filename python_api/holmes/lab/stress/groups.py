"""The communicators of a stress run: one for each group of the plan that this rank is in, on its planned NICs."""

from __future__ import annotations

import math
from typing import Any

from holmes.cluster.topology import Topology
from holmes.lab.stress.settings import KINDS, Settings
from holmes.planning.groups.group import Group
from holmes.planning.plan.plan import Plan, plan_for
from holmes_comm import Communicator, NicSelection, init


def make_plan(topology: Topology, settings: Settings) -> Plan:
    """Tensor groups inside hosts, data-parallel ones inside clusters, pipelines between. Local; equal on all ranks."""
    per_host = math.gcd(*(len(host.ranks) for host in topology.hosts))
    tensor = settings.tensor or (2 if per_host % 2 == 0 else 1)
    return plan_for(
        topology,
        model_layers=topology.world_size,
        tensor=tensor,
        pipeline=settings.pipeline or None,
    )


def groups_of(plan: Plan, rank: int) -> dict[str, tuple[int, Group]]:
    """A rank's groups of more than one rank: number and group by kind, in the same order on all ranks. Local."""
    found = {}
    for kind in KINDS:
        row = plan.grid.row_of(kind, rank)
        if row is not None and len(plan.groups(kind)[row].ranks) > 1:
            found[kind] = (row, plan.groups(kind)[row])
    return found


def make_communicator(kind: str, row: int, group: Group, store: Any, rank: int, settings: Settings) -> Communicator:
    """Collective over the group: its communicator, on the planned NICs. Raises HolmesError."""
    names = group.nics.get(rank, ())
    return init(
        store,
        group.ranks.index(rank),
        len(group.ranks),
        nics=NicSelection(names=names, max_rails=max(len(names), 1)),
        name=f"stress/{kind}{row}",
        timeout_s=settings.timeout_s,
        connect_timeout_s=settings.connect_timeout_s or settings.timeout_s,
    )


def sent_bytes(communicator: Communicator) -> dict[str, int]:
    """Bytes sent so far by NIC, or "shm". Local."""
    sent: dict[str, int] = {}
    for row in communicator.connections():
        nic = row["interface"] if row["transport"] == "tcp" else "shm"
        sent[nic] = sent.get(nic, 0) + row["sent_bytes"]
    return sent
