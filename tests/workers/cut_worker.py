"""One rank of a job of which the test cuts a pair: ``cut_worker.py FILE``; it goes on when FILE is there."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import holmes_comm

comm = holmes_comm.init(name="cut", timeout_s=30.0, connect_timeout_s=20.0)
print("connected", flush=True)
end = time.monotonic() + 30
while not Path(sys.argv[1]).exists() and time.monotonic() < end:
    time.sleep(0.02)
comm.all_reduce(np.ones(400_000))
