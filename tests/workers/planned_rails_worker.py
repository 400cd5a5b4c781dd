"""One data-parallel group as planned; prints its NICs and what each carried, as JSON."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

import holmes
from holmes_comm import torch_backend

dist.init_process_group("holmes")
# By line rates: measured ones of two equal rails differ on a busy machine.
plan = holmes.make_plan(model_layers=1, topology=holmes.gather_topology(measure_s=0))
groups = holmes.process_groups(plan, kinds=["dp"])
data = torch.ones(2_000_000)
dist.all_reduce(data, group=groups.dp)
assert (data == dist.get_world_size()).all()
sent: dict[str, int] = {}
for row in torch_backend.connections(groups.dp):
    sent[row["interface"]] = sent.get(row["interface"], 0) + row["sent_bytes"]
print(
    json.dumps({"planned": plan.group_of("dp", dist.get_rank()).nics[dist.get_rank()], "sent_bytes": sent}), flush=True
)
dist.barrier()
dist.destroy_process_group()
