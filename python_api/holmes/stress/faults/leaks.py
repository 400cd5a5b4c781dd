"""What a process holds that could leak, and whether that stayed flat."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Of these, a process must hold as many after an episode as after its first ones.
COUNTED = ("descriptors", "threads", "shared_memory_maps", "shm_names")
#: Memory may grow by so much between the first quarter and the last one: allocators keep what was freed.
RSS_SLACK_BYTES = 8 << 20
_WARM_UP = 3


def own_use() -> dict[str, int]:
    """Descriptors, threads, mappings of shared memory, names in /dev/shm, and resident bytes of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "shared_memory_maps": sum("memfd:holmes" in line for line in maps),
        "shm_names": len(os.listdir("/dev/shm")),
        "rss_bytes": int(status["VmRSS"].split()[0]) * 1024,
    }


def namespaces() -> int:
    """Distinct network namespaces of all processes that this one may look at."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                found.add(os.readlink(entry / "ns/net"))
            except OSError:  # gone meanwhile, or somebody else's
                continue
    return len(found)


def problems(name: str, history: Sequence[Mapping[str, int]]) -> list[str]:
    """What grew over a process's life: one use for each episode. Empty where it is too short to tell."""
    if len(history) < 2 * _WARM_UP:
        return []
    after = history[_WARM_UP:]
    found = []
    for what in COUNTED:
        first, last = min(use[what] for use in history[:_WARM_UP]), after[-1][what]
        if last > first:
            found.append(
                f"{name} holds {last} {what.replace('_', ' ')}, {first} at first, after {len(history)} episodes"
            )
    quarter = max(len(after) // 4, 1)
    early = max(use["rss_bytes"] for use in after[:quarter])
    late = max(use["rss_bytes"] for use in after[-quarter:])
    if late > early + RSS_SLACK_BYTES:
        found.append(
            f"{name} grew from {early / 2**20:.1f} to {late / 2**20:.1f} MiB resident over {len(history)} episodes"
        )
    return found
