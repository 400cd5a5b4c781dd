"""One timed call of an operation between two ranks, of their own API."""

from __future__ import annotations

import time
from typing import Any

import numpy as np


def timed_call(comm: Any, operation: str, data: np.ndarray[Any, Any], part: np.ndarray[Any, Any]) -> float:
    """Collective over two ranks: one call between barriers, of `data` or its half `part`; returns its seconds."""
    comm.barrier()
    start_s = time.perf_counter()
    if operation == "all_reduce":
        comm.all_reduce(data)
    elif operation == "reduce_scatter":
        comm.reduce_scatter(part, data)
    elif operation == "all_gather":
        comm.all_gather(data, part)
    elif comm.rank == 0:
        comm.send(data, 1)
        comm.recv(part[:1], 1)  # until it is there
    else:
        comm.recv(data, 0)
        comm.send(part[:1], 0)
    return time.perf_counter() - start_s
