"""Daemon threads are in calls of a communicator when the interpreter ends. Argument: which call."""

import random
import sys
import threading
import time

import numpy as np

import holmes_comm
from holmes_comm import _C

CALL = sys.argv[1]
store = _C.LocalStore()
ready = threading.Barrier(3)


def run(rank):
    communicator = holmes_comm.init(rank=rank, size=2, store=store, name="exit")
    values = np.ones(1000, np.float32)
    ready.wait()
    while True:
        if CALL == "recv":
            communicator.recv(values, 1 - rank)
        elif CALL == "all_reduce":
            communicator.all_reduce(values)
        else:
            communicator.barrier()


for number in range(2):
    threading.Thread(target=run, args=(number,), daemon=True).start()
ready.wait()
time.sleep(random.random() * 0.05)
