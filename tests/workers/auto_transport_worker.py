"""Ranks of a job on hosts with RDMA ports, as threads: `auto_transport_worker.py PORT SIZE FOLDER RANK ...`; rank 0
serves the store. Each rank sees the sysfs tree FOLDER/RANK as its host's. With CLUSTERS="a,a,b" they name these; with
NICS they ask for such. Prints, as JSON, what each rank was given, or its error."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

import holmes_comm
from holmes_comm import _C, NicSelection, errors, nic_agreement

SIZE, FOLDER = int(sys.argv[2]), Path(sys.argv[3])
discover = _C.discover_nics


def own_host() -> str:
    return threading.current_thread().name


def run_rank(rank: int) -> dict[str, Any]:
    store = holmes_comm.TcpStore("127.0.0.1", int(sys.argv[1]), is_server=rank == 0)
    clusters = os.environ.get("CLUSTERS")
    given = {
        "nics": NicSelection.parse(os.environ["NICS"]) if "NICS" in os.environ else None,
        "transport": os.environ.get("ASKED"),
        "cluster": clusters.split(",")[rank] if clusters else None,
        "hierarchical_min_bytes": 0 if clusters else None,
    }
    outcome: dict[str, Any] = {"rank": rank}
    try:
        comm = holmes_comm.init(store, rank, SIZE, name="job", connect_timeout_s=10.0, timeout_s=20.0, **given)
        for count in (1, 13, 400_000):
            data = np.full(count, rank + 1.0, "float32")
            comm.all_reduce(data)
            assert (data == SIZE * (SIZE + 1) / 2).all()
        around = np.zeros(400_000, "float32")
        work = comm.recv(around, (rank - 1) % SIZE, async_op=True)
        comm.send(np.full(400_000, rank, "float32"), (rank + 1) % SIZE)
        work.wait()
        assert (around == (rank - 1) % SIZE).all()
        outcome["peers"] = {
            str(peer): sorted({one["transport"] for one in comm.connections() if one["peer"] == peer and is_data(one)})
            for peer in range(SIZE)
            if peer != rank
        }
        comm.barrier()
        del comm
    except errors.HolmesError as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
    store.set(f"end/{rank}", b"1")
    for other in range(SIZE if rank == 0 else 0):
        store.get(f"end/{other}")
    return outcome


def is_data(connection: dict[str, Any]) -> bool:
    return bool(connection["purpose"] != "control")


def main() -> None:
    # Ranks of this machine stand for hosts of their own.
    nic_agreement.host_identity = own_host
    _C.discover_nics = lambda root=None: discover(str(FOLDER / own_host()))
    outcomes: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda rank=rank: outcomes.append(run_rank(rank)), name=str(rank))
        for rank in map(int, sys.argv[4:])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(outcomes))


main()
