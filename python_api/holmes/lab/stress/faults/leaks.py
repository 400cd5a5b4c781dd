"""What a process holds that could leak, and whether that stayed flat."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Of these, a process must hold as many after an episode as after its first ones.
COUNTED = ("descriptors", "threads", "shared_memory_maps", "shm_names", "processes", "namespaces")
#: Memory may grow by so much from the second quarter of a long life to its last one: freed pieces of pages are kept.
RSS_SLACK_BYTES = 8 << 20
_WARM_UP = 3
_LONG_LIFE = 100  # episodes; before, arenas and the records of the last failures still fill
_SETTLING = ("descriptors", "threads", "shared_memory_maps")
_SETTLE_S = 2.0  # how long ended communicators may take to close, and a flight record to be written: threads do it


class _Malloc(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _allocated() -> dict[str, int]:
    """Bytes that malloc has given out, and blocks of Python; gives back to the system what is free. glibc only."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return {}
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _Malloc
    info = libc.mallinfo2()
    return {"malloc_bytes": info.uordblks + info.hblkhd, "python_blocks": sys.getallocatedblocks()}


def own_use() -> dict[str, int]:
    """Descriptors, threads, mappings of shared memory, names in /dev/shm, and memory of this process."""
    allocated = _allocated()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "shared_memory_maps": sum("memfd:holmes" in line for line in maps),
        "shm_names": len(os.listdir("/dev/shm")),
        "rss_bytes": int(status["VmRSS"].split()[0]) * 1024,
        **allocated,
    }


def settled_use(least: dict[str, int]) -> dict[str, int]:
    """As own_use, once no more descriptors and threads are there than `least`, or after 2 s; lowers `least` to them."""
    end_s = time.monotonic() + _SETTLE_S
    while True:
        use = own_use()
        if all(use[what] <= least.get(what, sys.maxsize) for what in _SETTLING) or time.monotonic() >= end_s:
            break
        time.sleep(0.05)
    least.update({what: min(use[what], least.get(what, sys.maxsize)) for what in _SETTLING})
    return use


def descendants() -> list[int]:
    """Processes that this one started, and theirs; those of a testbed have no way out of this."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                # The name may hold anything, so: after its last bracket. Then state and parent.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:  # gone meanwhile
                continue
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def driver_use() -> dict[str, int]:
    """As own_use, and the processes and network namespaces of the testbed."""
    use = own_use()
    del use["shm_names"]  # of this machine: others use it too
    pids, spaces = descendants(), set()
    for pid in pids:
        with contextlib.suppress(OSError):  # gone meanwhile
            spaces.add(os.readlink(f"/proc/{pid}/ns/net"))
    return {**use, "processes": len(pids), "namespaces": len(spaces)}


def problems(name: str, history: Sequence[Mapping[str, int]]) -> list[str]:
    """What grew over a process's life: one use for each episode. Empty where it is too short to tell."""
    if len(history) < 2 * _WARM_UP:
        return []
    after = history[_WARM_UP:]
    found = []
    for what in COUNTED:
        if what not in after[-1]:
            continue
        first, last = max(use[what] for use in history[:_WARM_UP]), after[-1][what]
        if last > first:
            found.append(
                f"{name} holds {last} {what.replace('_', ' ')}, {first} at first, after {len(history)} episodes"
            )
    if len(history) < _LONG_LIFE:
        return found
    quarter = len(history) // 4
    early = max(use["rss_bytes"] for use in history[quarter : 2 * quarter])
    late = max(use["rss_bytes"] for use in history[-quarter:])
    if late > early + RSS_SLACK_BYTES:
        found.append(
            f"{name} grew from {early / 2**20:.1f} to {late / 2**20:.1f} MiB resident over {len(history)} episodes"
        )
    return found
