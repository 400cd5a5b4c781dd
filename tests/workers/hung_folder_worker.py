"""A deadline passes while the flight record's folder hangs, as on a dead network file system: a FIFO nobody reads.

Prints the seconds until the error, of the first failure and of one after it. Argument: the folder."""

import os
import sys
import threading
import time

import numpy as np

import holmes_comm
from holmes_comm import _C, errors

os.mkfifo(os.path.join(sys.argv[1], f"{_C.host_name()}-{os.getpid()}.json.part"))
store = _C.LocalStore()
done = threading.Event()


def run(rank, name):
    communicator = holmes_comm.init(rank=rank, size=2, store=store, name=name, timeout_s=1.0)
    if rank == 1:
        done.wait()
        return
    began = time.monotonic()
    try:
        communicator.all_reduce(np.ones(10))
    except errors.TimeoutError:
        print(time.monotonic() - began, flush=True)


for name in ("first", "second"):
    threads = [threading.Thread(target=run, args=(rank, name)) for rank in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join()
    done.set()
    threads[1].join()
    done.clear()
