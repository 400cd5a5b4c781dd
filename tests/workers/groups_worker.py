"""A job on the testbed: plans, proves, makes every kind of group; prints what went over which NIC, as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

import holmes
from holmes_comm import torch_backend

COUNT = 500_000  # float32: 2 MB


def sent_bytes(group: dist.ProcessGroup) -> dict[str, int]:
    """By interface, or "shm"; of collectives."""
    sent: dict[str, int] = {}
    for row in torch_backend.connections(group):
        if row["purpose"] == "collective":
            key = row["interface"] if row["transport"] == "tcp" else "shm"
            sent[key] = sent.get(key, 0) + row["sent_bytes"]
    return sent


def reduce_in(group: dist.ProcessGroup) -> dict[str, Any]:
    """All-reduces, checks the sum, and tells what was sent."""
    before = sent_bytes(group)
    data = torch.full((COUNT,), float(dist.get_rank()))
    dist.all_reduce(data, group=group)
    ranks = dist.get_process_group_ranks(group)
    assert (data == sum(ranks)).all(), (ranks, data[0])
    after = sent_bytes(group)
    return {
        "ranks": ranks,
        "sent_bytes": {nic: count - before.get(nic, 0) for nic, count in after.items()},
        "reason": torch_backend.nic_reason(group),
        "priority": torch_backend.group_options(group).priority,
    }


dist.init_process_group("holmes")
rank = dist.get_rank()
topology = holmes.gather_topology()
outcome: dict[str, Any] = {"host": topology.host_of(rank).name, "hosts": [host.ranks for host in topology.hosts]}
plans = {
    "inside": holmes.plan_for(topology, model_layers=4, tensor=2, pipeline=2),
    "spanning": holmes.plan_for(topology, model_layers=4, tensor=2, pipeline=1, span_clusters=True),
}
for title, plan in plans.items():
    proof = holmes.check(plan, topology)
    kinds = holmes.KINDS if title == "inside" else ("tp", "dp", "pp")
    groups = holmes.process_groups(plan, kinds=kinds)
    reduced = {kind: reduce_in(group) for kind, group in groups.items() if dist.get_world_size(group) > 1}
    planned = {kind: list(plan.group_of(kind, rank).ranks) for kind in groups}
    outcome[title] = {"holds": proof.holds, "violations": [item.kind for item in proof.violations]}
    outcome[title] |= {"groups": reduced, "planned": planned}
print(json.dumps(outcome), flush=True)
dist.barrier()
dist.destroy_process_group()
