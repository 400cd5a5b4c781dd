"""Ranks 1 -> 2 -> 3 pass messages on; nothing gets from 1 to 2 any more. Started by test_unreachable.py."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import holmes_comm


def main() -> None:
    rank = int(os.environ["RANK"])
    # Rank 3 waits for the shortest time, so the verdict is that of the one farthest from the cut.
    comm = holmes_comm.init(name="chain", timeout_s=3.0 if rank == 3 else 20.0)
    data = np.ones(1000, np.float32)
    comm.all_reduce(data)
    print("connected", flush=True)
    end = time.monotonic() + 30
    while not Path(sys.argv[1]).exists() and time.monotonic() < end:
        time.sleep(0.02)
    begin = time.monotonic()
    try:
        if rank == 1:
            comm.send(data, 2)
        comm.recv(data, {0: 1, 1: 2, 2: 1, 3: 2}[rank])
    except holmes_comm.HolmesError as error:
        facts = {"rank": error.rank, "peer": error.peer, "nic": error.nic, "host": error.host}
        told = {"error": type(error).__name__, "seconds": time.monotonic() - begin, "message": str(error)}
        print(json.dumps(facts | told), flush=True)


main()
