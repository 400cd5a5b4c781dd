"""All-reduces over two clusters, through the own API and through torch; prints what each NIC sent, as JSON."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import holmes_comm
from holmes_comm import torch_backend

COUNT = 2_000_000  # float32: 8 MB
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def sent_bytes(connections: list[dict[str, Any]]) -> dict[str, int]:
    """Payload and headers of collectives, by interface."""
    sent: dict[str, int] = {}
    for connection in connections:
        if connection["purpose"] == "collective":
            sent[connection["interface"]] = sent.get(connection["interface"], 0) + connection["sent_bytes"]
    return sent


def growth(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """What was sent in between."""
    return {interface: count - before.get(interface, 0) for interface, count in after.items()}


os.environ["HOLMES_CLUSTER"] = "ab"[RANK // 2]
store = holmes_comm.TcpStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, is_server=RANK == 0)
comm = holmes_comm.init(store, RANK, SIZE, name="hierarchy")
expected = np.arange(COUNT, dtype="float32") % 1000 * SIZE + sum(range(SIZE))
outcome: dict[str, Any] = {"payload_bytes": COUNT * 4}
for title, compression in (("plain", None), ("bf16", holmes_comm.Compression("bf16"))):
    data = np.arange(COUNT, dtype="float32") % 1000 + RANK
    before = sent_bytes(comm.connections())
    comm.all_reduce(data, compression=compression)
    error = float(np.abs(data - expected).max() / expected.max())
    outcome[title] = {"sent_bytes": growth(sent_bytes(comm.connections()), before), "error": error}
comm.barrier()

dist.init_process_group("holmes")
tensor = torch.arange(COUNT, dtype=torch.float32) % 1000 + RANK
before = sent_bytes(torch_backend.connections())
dist.all_reduce(tensor)
outcome["torch"] = {
    "sent_bytes": growth(sent_bytes(torch_backend.connections()), before),
    "error": float(np.abs(tensor.numpy() - expected).max() / expected.max()),
    "reason": torch_backend.nic_reason(),
}
print(json.dumps(outcome), flush=True)
dist.barrier()
dist.destroy_process_group()
