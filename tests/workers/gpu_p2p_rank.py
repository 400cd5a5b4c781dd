"""A rank of a job that sends a GPU's memory, on the fake CUDA driver: `python gpu_p2p_rank.py RANK PORT`. Rank 1 kills
itself while copies and transfers are under way."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
from fake_gpu import Array

import holmes_comm


def main() -> None:
    rank, port = map(int, sys.argv[1:])
    store = holmes_comm.TcpStore("127.0.0.1", port, is_server=rank == 0)
    comm = holmes_comm.init(store, rank, 2, transport="tcp", timeout_s=30.0)
    works = []
    start = time.monotonic()
    try:
        for tag in range(64):
            works.append(comm.send(Array(np.zeros(1 << 20, np.uint8), rank), 1 - rank, tag, async_op=True))
            works.append(comm.recv(Array(np.zeros(1 << 20, np.uint8), rank), 1 - rank, tag, async_op=True))
        works[1].wait()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for work in works:
            work.wait()
    except holmes_comm.PeerLostError as error:
        works.clear()
        print(f"{type(error).__name__} after {time.monotonic() - start:.2f} s: {error}", flush=True)
        time.sleep(1.0)  # what was under way ends, with the buffers freed above: the fake would notice
        sys.exit(0 if time.monotonic() - start < 10 else 2)
    sys.exit(3)


if __name__ == "__main__":
    main()
