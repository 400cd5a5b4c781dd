"""A rank whose allocations fail on all threads but its own while its operation ends: FILE RANK. Prints what followed.

Preloaded with tests/helpers/failing_new.cpp on rank 0.
"""

import ctypes
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

folder, rank = sys.argv[1], int(sys.argv[2])
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("holmes", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
data = torch.ones(1000)
dist.all_reduce(data)  # threads and buffers are there
if rank == 1:
    store.wait(["armed"])
    dist.all_reduce(data)
    store.wait(["done"])
else:
    new = ctypes.CDLL(None)
    new.failing_new_spare_this_thread()
    work = dist.all_reduce(data, async_op=True)
    future = work.get_future()
    seen = []
    future.add_done_callback(lambda done: seen.append(True))
    new.failing_new_arm(True)
    store.set("armed", "")
    end_s = time.monotonic() + 20
    while not future.done() and time.monotonic() < end_s:
        time.sleep(0.01)
    new.failing_new_arm(False)
    try:
        if not future.done():
            said = "never completed"
        else:
            future.wait()
            said = f"completed with {data.unique().tolist()}"
    except Exception as error:
        said = f"failed: {type(error).__name__}"
    print(said, bool(seen), flush=True)
    store.set("done", "")
