"""Two ranks on fabrics without a route between them; prints the outcome as JSON."""

from __future__ import annotations

import json
import os
import time

import holmes_comm

# Of the four ranks of the testbed one of each cluster takes part.
MEMBERS = [0, 2]
if int(os.environ["RANK"]) not in MEMBERS:
    raise SystemExit(0)
rank = MEMBERS.index(int(os.environ["RANK"]))
store = holmes_comm.TcpStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_server=rank == 0)
nic = next(nic for nic in holmes_comm.discover_nics() if nic.nic_class in ("infiniband", "roce_v2"))
start = time.monotonic()
try:
    options = holmes_comm.CommunicatorOptions(
        rank=rank, size=2, name="apart", nics=[(nic.netdev, nic.address)], transport="tcp", connect_timeout_s=4.0
    )
    holmes_comm._C.make_communicator(store, options)
    print(json.dumps({"error": None}), flush=True)
except holmes_comm.HolmesError as error:
    outcome = {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - start}
    print(json.dumps(outcome), flush=True)
store.set(f"done{rank}", b"1")
store.wait([f"done{1 - rank}"], 20.0)
