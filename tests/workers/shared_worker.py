"""One of two ranks whose arrays are in shared memory: ``shared_worker.py STORE_PORT RANK WHAT``. Prints JSON."""

import gc
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import holmes_comm

port, rank, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
said: dict[str, Any] = {}


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("holmes-buffer")


def open_buffers() -> int:
    return sum(
        "holmes-buffer" in os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()
    )


def sums(comm: Any, array: Any, steps: int = 5) -> bool:
    is_right = True
    for step in range(steps):
        array[:] = rank + step
        comm.all_reduce(array)
        is_right &= bool((array == 1 + 2 * step).all())
        comm.broadcast(array, src=step % 2)
    return is_right


def forked_sums(comm: Any, array: Any) -> bool:
    """The children write into the parent's array, and let go of it, while it is in use."""
    is_right = True
    for step in range(5):
        child = os.fork()
        if child == 0:
            array[:] = -1
            os._exit(0)
        is_right &= sums(comm, array, 2)
        array[:] = step
        is_right &= os.waitpid(child, 0)[1] == 0 and bool((array == step).all())
    return is_right


def until_the_other_is_lost(comm: Any, array: Any) -> None:
    try:
        for step in range(10**6):
            if rank == 0 and step == 20:
                comm.all_reduce(array, async_op=True)
                os.kill(os.getpid(), signal.SIGKILL)
            comm.all_reduce(array)
    except holmes_comm.HolmesError as error:
        said["error"] = type(error).__name__
    array[:] = 3
    said["is_usable"] = bool((array == 3).all())


def main() -> None:
    store = holmes_comm.TcpStore("127.0.0.1", port)
    comm = holmes_comm.init(store, rank, 2, timeout_s=30.0)
    array = holmes_comm.empty(5_000_000, "float32")  # written past the caches
    if what == "killed":
        until_the_other_is_lost(comm, array)
    elif what == "forks":
        said["is_right"] = forked_sums(comm, array)
    elif what == "many":
        said["is_right"] = all(sums(comm, one, 1) for one in [holmes_comm.empty(70_000, "float32") for _ in range(300)])
    elif what == "no descriptor left" and rank == 0:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        said["is_right"] = sums(comm, array)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        said["mapped_during"] = mapped()
    else:
        said["is_right"] = sums(comm, array)
        said["mapped_during"] = mapped()  # this rank's own, and the peer's
        comm.barrier()
    if what == "no descriptor left" and rank == 0:
        comm.barrier()


main()
gc.collect()
print(json.dumps(said | {"mapped_after": mapped(), "open_after": open_buffers()}))
