"""A rank with everything that the board shows: bytes and operations of `dp`, a failure of `short`, and a wait, because
rank 1 stays away from `late`; until it is killed."""

from __future__ import annotations

import contextlib
import time

import numpy as np

import holmes_comm

dp, short, late = (holmes_comm.init(name=name, transport="tcp") for name in ("dp", "short", "late"))
waits = late.all_reduce(np.ones(1, "float32"), async_op=True) if late.rank == 0 else None
print("ready", flush=True)
for number in range(100_000):
    dp.all_reduce(np.ones(100_000, "float32"))
    time.sleep(0.01)
    if number == 300 and short.rank == 0:  # when scrapes have begun: it fails before everybody's eyes
        with contextlib.suppress(holmes_comm.HolmesError):
            short.all_reduce(np.ones(1, "float32"), timeout_s=0.1)
