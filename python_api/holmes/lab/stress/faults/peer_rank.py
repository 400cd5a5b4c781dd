"""One rank of a library under a fault: all-reduces until one fails. `python -m ...peer_rank LIBRARY TIMEOUT_S`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import numpy as np

_COUNT = 65536
_PAUSE_S = 0.002


def _holmes(rank: int, size: int, timeout_s: float) -> Callable[[], object]:
    import holmes_comm

    store = holmes_comm.TcpStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_server=rank == 0)
    comm = holmes_comm.init(store, rank, size, name="peers", timeout_s=timeout_s)
    data = np.ones(_COUNT, np.float32)
    return lambda: comm.all_reduce(data, op="max")


def _gloo(rank: int, size: int, timeout_s: float) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    data = torch.ones(_COUNT)
    return lambda: dist.all_reduce(data, op=dist.ReduceOp.MAX)


def _openmpi(rank: int, size: int, timeout_s: float) -> Callable[[], object]:
    import mpi4py

    from holmes.tools.bench.job_network import connect_to_launcher
    from holmes.tools.bench.peer_mpi import transport_parameters

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    os.environ.update(transport_parameters("openmpi-tcp", MPI.get_vendor()[1][0], os.environ))
    connect_to_launcher()
    MPI.Init_thread(MPI.THREAD_SINGLE)
    world = MPI.COMM_WORLD
    world.Set_errhandler(MPI.ERRORS_RETURN)
    data = np.ones(_COUNT, np.float32)
    return lambda: world.Allreduce(MPI.IN_PLACE, data, MPI.MAX)


def main() -> None:
    """Runs until an operation raises, then says what and when (time.monotonic)."""
    library, timeout_s = sys.argv[1], float(sys.argv[2])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    call = {"holmes": _holmes, "gloo": _gloo, "openmpi": _openmpi}[library](rank, size, timeout_s)
    call()
    print(json.dumps({"event": "running", "rank": rank, "pid": os.getpid()}), flush=True)
    try:
        while True:
            call()
            time.sleep(_PAUSE_S)
    except Exception as error:  # of whichever library
        report = {"event": "failed", "rank": rank, "at_s": time.monotonic(), "error": type(error).__name__}
        report["peer"] = getattr(error, "peer", None)  # where the error says it apart from its text
        print(json.dumps({**report, "message": str(error)[:1500]}), flush=True)
        os._exit(1)  # no clean-up of a library that may hang in it


if __name__ == "__main__":
    main()
