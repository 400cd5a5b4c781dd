"""Runs a function on several ranks, each a process, with a default group over the holmes backend; or a module."""

import multiprocessing
import os
import queue
import runpy
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

#: Imported once, by the server that every rank is forked from: torch takes seconds.
PRELOADED = ["torch.distributed.checkpoint", "torch.distributed.pipelining", "holmes", "holmes_comm.torch_backend"]


def init(store, rank, size, backend="holmes", timeout_s=30.0, **options):
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s), **options
    )


def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _take_environment(environment):
    torch.set_num_threads(1)
    os.environ.clear()  # the server's, as it was when that started
    os.environ.update(environment)


def _rank_main(function, rank, size, port, results, args, environment):
    _take_environment(dict(environment, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank)))
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
    context = _context()
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


def _module_main(module, arguments, environment, output):
    _take_environment(environment)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    sys.stdout.reconfigure(line_buffering=True)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _read_lines(descriptor, on_line):
    with open(descriptor, errors="replace") as lines:
        for line in lines:
            on_line(line.rstrip())


def run_module(module, arguments, environments, on_line, timeout_s=100.0):
    """`python -m module arguments` in each of these environments at once; `on_line` gets what they print.

    Returns 0, or the exit code of one that failed, which ends the others.
    """
    context = _context()
    ranks, readers = [], []
    for environment in environments:
        reading, writing = context.Pipe(duplex=False)
        ranks.append(context.Process(target=_module_main, args=(module, arguments, environment, writing)))
        ranks[-1].start()
        writing.close()
        readers.append(threading.Thread(target=_read_lines, args=(os.dup(reading.fileno()), on_line)))
        readers[-1].start()
    deadline_s = time.monotonic() + timeout_s
    try:
        while running := [process for process in ranks if process.exitcode is None]:
            if failed := [process.exitcode for process in ranks if process.exitcode]:
                return failed[0]
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"{module} has not ended within {timeout_s:g} s"
            wait([process.sentinel for process in running], left_s)
    finally:
        for process in ranks:
            process.kill()
            process.join()
        for reader in readers:
            reader.join(10)
    return next((process.exitcode for process in ranks if process.exitcode), 0)
