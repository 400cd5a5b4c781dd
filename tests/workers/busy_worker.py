"""A rank that exchanges megabytes until it is killed; with STALL=ROUNDS rank 1 stays away from that round on."""

from __future__ import annotations

import os
import time

import numpy as np

import holmes_comm

comm = holmes_comm.init(name="dp", transport="tcp")
rounds = int(os.environ.get("STALL", "0")) if comm.rank == 1 else 0
print("ready", flush=True)
number = 0
while number < 100_000:
    number += 1
    if number == rounds:
        time.sleep(60)
    comm.all_reduce(np.ones(100_000, "float32"))
    time.sleep(0.005)
