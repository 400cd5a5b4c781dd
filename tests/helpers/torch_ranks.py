"""Runs a function on several ranks, each a process, with a default group over the holmes backend."""

import multiprocessing
import os
import queue
import signal
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

#: Imported once, by the server that every rank is forked from: torch takes seconds.
PRELOADED = ["torch.distributed.checkpoint", "torch.distributed.pipelining", "holmes", "holmes_comm.torch_backend"]


def init(store, rank, size, backend="holmes", timeout_s=30.0, **options):
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s), **options
    )


def _rank_main(function, rank, size, port, results, args, environment):
    torch.set_num_threads(1)
    os.environ.clear()  # the server's, as it was when that started
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    try:
        results.put((rank, True, function(rank, size, store, *args)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(function, size, *args, timeout_s=100.0, lost=()):
    """What `function(rank, size, store, *args)` returns on each rank; None for the `lost` ones, which must die."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    results = context.Queue()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        context.Process(target=_rank_main, args=(function, rank, size, server.port, results, args, dict(os.environ)))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    returned = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(returned) < size - len(lost):
            try:
                rank, is_ok, value = results.get(timeout=0.2)
            except queue.Empty:
                dead = [r for r, p in enumerate(ranks) if p.exitcode not in (None, 0) and r not in (*lost, *returned)]
                assert not dead, f"ranks {dead} died: {[ranks[r].exitcode for r in dead]}"
                assert time.monotonic() < deadline, f"only ranks {sorted(returned)} of {size} finished"
                continue
            assert is_ok, f"rank {rank} failed:\n{value}"
            returned[rank] = value
        for rank, process in enumerate(ranks):
            process.join(timeout=20)
            expected = -signal.SIGKILL if rank in lost else 0
            assert process.exitcode == expected, f"rank {rank} ended with {process.exitcode}"
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
    return [returned.get(rank) for rank in range(size)]
