"""A rank of a job on the fake NCCL, a process of its own: `python nccl_rank.py RANK SIZE PORT`. Rank 1 kills itself."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
from fake_gpu import Array

import holmes_comm


def main() -> None:
    rank, size, port = map(int, sys.argv[1:])
    store = holmes_comm.TcpStore("127.0.0.1", port, is_server=rank == 0)
    comm = holmes_comm.init(store, rank, size, backend="nccl", device=rank, timeout_s=30.0)
    data = Array(np.ones(100), rank)
    comm.all_reduce(data, async_op=True).wait()
    assert set(data.values) == {float(size)}
    store.set(f"done/{rank}", b"")
    if rank == 1:
        for other in range(size):
            store.get(f"done/{other}", 30.0)  # nobody needs this rank any more
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        comm.all_reduce(data, async_op=True).wait()
    except holmes_comm.CommunicatorError as error:
        print(f"{type(error).__name__} after {time.monotonic() - start:.2f} s: {error}", flush=True)
        os._exit(0 if time.monotonic() - start < 10 else 2)
    os._exit(3)


if __name__ == "__main__":
    main()
