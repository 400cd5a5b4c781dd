"""One rank of a pair that the test cuts, or whose rank 1 is stopped, in mid-transfer: ``silent_cut_worker.py ROUNDS
STOP_S``.

All deadlines are the defaults. Prints how it ended: the error and how long after the last finished operation it came.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np
from outcomes import error_fields

import holmes_comm

values = np.ones(1 << 22, np.uint8)
comm = holmes_comm.init(name="cut")
comm.all_reduce(values)
print("connected", flush=True)
if comm.rank == 1 and float(sys.argv[2]):
    me = os.getpid()
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -STOP {me}; sleep {sys.argv[2]}; kill -CONT {me}"])
last = time.monotonic()
outcome: dict[str, object] = {"rank": comm.rank, "error": None, "longest_s": 0.0}
try:
    for _ in range(int(sys.argv[1])):
        comm.all_reduce(values)
        now = time.monotonic()
        outcome["longest_s"] = max(outcome["longest_s"], now - last)
        last = now
except holmes_comm.HolmesError as error:
    outcome |= {**error_fields(error), "seconds": time.monotonic() - last}
print(json.dumps(outcome), flush=True)
