"""Four pipeline stages on two clusters, through the own API and as a planned torch group; prints, as JSON, what each
rank sent to each of the others over which NIC."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import holmes
import holmes_comm
from holmes_comm import torch_backend

COUNT = 250_000  # float32: 1 MB
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def sent_bytes(connections: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """By peer and interface, of sends and receives; what carried nothing is left out."""
    sent: dict[str, dict[str, int]] = {}
    for connection in connections:
        if connection["purpose"] == "p2p" and connection["sent_bytes"]:
            of_peer = sent.setdefault(str(connection["peer"]), {})
            of_peer[connection["interface"]] = of_peer.get(connection["interface"], 0) + connection["sent_bytes"]
    return sent


outcome: dict[str, Any] = {"payload_bytes": COUNT * 4}
store = holmes_comm.TcpStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, is_server=RANK == 0)
for name, min_bytes in (("hierarchical", 0), ("flat", "never")):
    comm = holmes_comm.init(
        store, RANK, SIZE, name=name, cluster="ab"[RANK // 2], hierarchical_min_bytes=min_bytes, transport="tcp"
    )
    received = np.zeros(COUNT, dtype="float32")
    if RANK > 0:
        comm.recv(received, RANK - 1)
        assert (received == RANK - 1).all()
    if RANK < SIZE - 1:
        comm.send(np.full(COUNT, RANK, dtype="float32"), RANK + 1)
    comm.barrier()
    outcome[name] = sent_bytes(comm.connections())

dist.init_process_group("holmes")
plan = holmes.plan_for(holmes.gather_topology(), model_layers=4, tensor=1, pipeline=4)
group = holmes.process_groups(plan, kinds=("pp",)).pp
stage, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
activations = torch.zeros(COUNT)
if stage > 0:
    dist.recv(activations, ranks[stage - 1], group=group)
    assert (activations == stage).all()
activations += 1
if stage < SIZE - 1:
    dist.send(activations, ranks[stage + 1], group=group)
total = torch.ones(COUNT)
dist.all_reduce(total, group=group)  # runs flat
assert (total == SIZE).all()
connections = torch_backend.connections(group)
outcome["torch"] = sent_bytes(connections)
outcome["connected"] = sorted({(row["peer"], row["purpose"], row["interface"]) for row in connections})
outcome["stage"] = stage
outcome["reason"] = torch_backend.nic_reason(group)
print(json.dumps(outcome), flush=True)
dist.barrier()
dist.destroy_process_group()
