"""One rank after another is on a fabric that the others do not reach; prints the outcomes as JSON."""

from __future__ import annotations

import json
import os

import holmes_comm

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = holmes_comm.TcpStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_server=rank == 0)
nics = {nic.nic_class: (nic.netdev, nic.address) for nic in holmes_comm.discover_nics()}
rdma = nics.get("infiniband") or nics["roce_v2"]
for cut_off in range(size):
    chosen = rdma if rank == cut_off else nics["ethernet"]
    try:
        options = holmes_comm.CommunicatorOptions(
            rank=rank, size=size, name=f"cut{cut_off}", nics=[chosen], transport="tcp", connect_timeout_s=4.0
        )
        holmes_comm._C.make_communicator(store, options)
        print(json.dumps({"error": None}), flush=True)
    except holmes_comm.HolmesError as error:
        facts = {"rank": error.rank, "peer": error.peer, "host": error.host}
        print(json.dumps({"error": type(error).__name__, "message": str(error)} | facts), flush=True)
store.set(f"done{rank}", b"1")
store.wait([f"done{other}" for other in range(size)], 20.0)
