"""A daemon thread is in torch.distributed when the interpreter ends. Arguments: rank, file of the store."""

import random
import sys
import threading
import time

import torch
import torch.distributed as dist

dist.init_process_group("holmes", rank=int(sys.argv[1]), world_size=2, init_method=f"file://{sys.argv[2]}")
dist.barrier()


def run():
    values = torch.ones(1000)
    while True:
        dist.all_reduce(values)


threading.Thread(target=run, daemon=True).start()
time.sleep(0.05 + random.random() * 0.05)
