"""All-reduces over two rails; prints whether the result is right and what each NIC sent, as JSON."""

from __future__ import annotations

import json
import os

import numpy as np

import holmes_comm

rank = int(os.environ["RANK"])
store = holmes_comm.TcpStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_server=rank == 0)
comm = holmes_comm.init(store, rank, 2, nics=holmes_comm.NicSelection(nic_class="roce", max_rails=2), name="rails")
rounds, count = 4, 2_000_000
right = True
for number in range(rounds):
    data = np.arange(count, dtype="float32") % 1000 + rank + number
    comm.all_reduce(data)
    right &= bool((data == 2 * (np.arange(count) % 1000) + 1 + 2 * number).all())
sent: dict[str, int] = {}
for connection in comm.connections():
    if connection["purpose"] == "collective":
        sent[connection["interface"]] = sent.get(connection["interface"], 0) + connection["sent_bytes"]
print(json.dumps({"right": right, "sent_bytes": sent, "payload_bytes": rounds * count * 4}), flush=True)
comm.barrier()
