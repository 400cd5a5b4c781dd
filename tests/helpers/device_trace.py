"""What the fake devices' trace says (tests/fake_nccl/device_trace.hpp): who waits for whom, what ran side by side."""

from __future__ import annotations

import itertools
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Item:
    """Something on a stream. Times in seconds; None: not yet."""

    number: tuple[str, int]  # process, and in it
    device: tuple[str, int]
    stream: tuple[str, str]
    kind: str  # kernel, point, wait, task
    label: str = ""
    point: tuple[str, str] | None = None
    ctas: int = 0
    communicator: str = ""
    name: str = ""  # of its library
    rank: int = 0
    size: int = 0
    parts: list[str] = field(default_factory=list)
    first: float | None = None  # it is the first one of its stream
    begin: float | None = None
    end: float | None = None

    def text(self) -> str:
        if self.kind == "kernel":
            return f"{self.label} of {self.name}, rank {self.rank}, on device {self.device[1]}"
        return f"{self.kind} {self.label}".strip()


class DeviceTrace:
    """All items of a folder of traces, read now."""

    def __init__(self, folder: Path) -> None:
        self.items: dict[tuple[str, int], Item] = {}
        self.multiprocessors = 0
        for path in sorted(folder.glob("*.trace")):
            for line in path.read_text().splitlines():
                self._read(path.stem, line)
        self.streams: dict[tuple[str, str], list[Item]] = defaultdict(list)
        self.parts: dict[tuple[str, int, str], Item] = {}
        self.points: dict[tuple[str, str], Item] = {}
        for item in self.items.values():
            self.streams[item.stream].append(item)
            for part in item.parts:
                self.parts[item.communicator, item.rank, part] = item
            if item.kind == "point" and item.point:
                self.points[item.point] = item

    def _read(self, process: str, line: str) -> None:
        what, *rest = line.split()
        if what == "multiprocessors":
            self.multiprocessors = int(rest[0])
        elif what == "+":
            number, device, stream, kind, *more = rest
            item = Item((process, int(number)), (process, int(device)), (process, stream), kind)
            if kind == "kernel":
                ctas, item.communicator, item.name, rank, size, parts, item.label = more
                item.ctas, item.rank, item.size = int(ctas), int(rank), int(size)
                item.parts = [] if parts == "-" else parts.split(",")
            elif kind == "task":
                item.label = more[0]
            else:
                item.point = (process, more[0])
            self.items[item.number] = item
        else:
            number, nanoseconds, ctas = rest
            item = self.items[process, int(number)]
            setattr(item, {"r": "first", "b": "begin", "e": "end"}[what], int(nanoseconds) / 1e9)
            if what == "b":
                item.ctas = int(ctas)

    def partners(self, item: Item) -> list[tuple[int, str]]:
        """The parts that this kernel stays for: rank and part."""
        found = []
        for part in item.parts:
            kind, _, number = part.partition(":")
            if kind == "all":
                found += [(rank, part) for rank in range(item.size) if rank != item.rank]
            elif int(kind[1:]) != item.rank:
                found.append((int(kind[1:]), f"{'r' if kind[0] == 's' else 's'}{item.rank}:{number}"))
        return found

    def blocked(self) -> list[Item]:
        """What can never end, whatever the hosts do from now on: what is not in the least set of what can.

        What no host has put on a stream yet counts as what may come.
        """
        open_items = [item for item in self.items.values() if item.end is None]
        before: dict[tuple[str, int], Item | None] = {}
        for items in self.streams.values():
            last: Item | None = None
            for item in items:
                if item.end is None:
                    before[item.number] = last
                    last = item
        kernels: dict[tuple[str, int], list[Item]] = defaultdict(list)
        for item in open_items:
            if item.kind == "kernel" and item.first is not None:
                kernels[item.device].append(item)
        ends: set[tuple[str, int]] = set()
        begins: set[tuple[str, int]] = {item.number for item in open_items if item.begin is not None}

        def can_begin(item: Item) -> bool:
            ahead = before[item.number]
            if ahead is not None and ahead.number not in ends:
                return False
            if item.kind == "wait":
                record = self.points.get(item.point) if item.point else None
                return record is None or record.end is not None or record.number in ends
            if item.kind != "kernel":
                return True
            others = [one for one in kernels[item.device] if one is not item]
            stay = sum(one.ctas for one in others if one.begin is not None and one.number not in ends)
            queue = [one for one in others if one.begin is None and item.first and one.first and one.first < item.first]
            return stay + item.ctas <= self.multiprocessors and all(one.number in begins for one in queue)

        def can_end(item: Item) -> bool:
            for rank, part in self.partners(item):
                other = self.parts.get((item.communicator, rank, part))
                if other is not None and other.end is None and other.number not in begins:
                    return False
            return True

        grows = True
        while grows:
            size = len(begins) + len(ends)
            begins |= {item.number for item in open_items if item.number not in begins and can_begin(item)}
            ends |= {item.number for item in open_items if item.number in begins and can_end(item)}
            grows = len(begins) + len(ends) > size
        return [item for item in open_items if item.number not in ends]

    def deadlock(self) -> str:
        """Who waits for whom in a deadlock of the devices, a line for each kernel in it; empty where there is none."""
        stuck = self.blocked()
        lines = []
        for item in stuck:
            if item.kind != "kernel" or item.first is None:
                continue
            if item.begin is None:
                held = [one for one in stuck if one.device == item.device and one.begin is not None]
                used = sum(one.ctas for one in held)
                lines.append(
                    f"{item.text()}: waits for {item.ctas} of {self.multiprocessors} multiprocessors, of which "
                    f"{used} are held by {', '.join(one.text() for one in held) or 'nobody'}"
                )
                continue
            for rank, part in self.partners(item):
                other = self.parts.get((item.communicator, rank, part))
                if other is None or other.begin is not None:
                    continue
                ahead = next(one for one in self.streams[other.stream] if one.end is None)
                why = f"behind {self._cause(ahead)}" if ahead is not other else "which waits for multiprocessors"
                lines.append(
                    f"{item.text()}: holds {item.ctas} multiprocessors until rank {rank}'s {other.label} begins, {why}"
                )
        return "deadlock of the devices:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""

    def _cause(self, item: Item) -> str:
        """What an item that is stuck waits for in the end."""
        record = self.points.get(item.point) if item.kind == "wait" and item.point else None
        if record is None:
            return item.text()
        first = next((one for one in self.streams[record.stream] if one.end is None), record)
        return f"an event behind {first.text() if first.kind != 'wait' else self._cause(first)}"

    def kernels(self) -> list[Item]:
        return [item for item in self.items.values() if item.kind == "kernel" and item.begin and item.end]

    def busy(self, name: str, device: tuple[str, int]) -> list[tuple[float, float]]:
        """When kernels of that library (or `compute`) had multiprocessors of the device: disjoint intervals."""
        return union((k.begin, k.end) for k in self.kernels() if k.name == name and k.device == device)

    def overlaps(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Of each pair of libraries: the seconds in which both ran on a device, and those of the one that ran less."""
        devices = sorted({kernel.device for kernel in self.kernels()})
        names = sorted({kernel.name for kernel in self.kernels()})
        table = {}
        for a, b in itertools.combinations(names, 2):
            both = least = 0.0
            for device in devices:
                one, other = self.busy(a, device), self.busy(b, device)
                both += sum(max(0.0, min(p[1], q[1]) - max(p[0], q[0])) for p in one for q in other)
                least += min(sum(end - begin for begin, end in one), sum(end - begin for begin, end in other))
            table[a, b] = (both, least)
        return table


def union(intervals: Iterable[tuple[float | None, float | None]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted((b, e) for b, e in intervals if b is not None and e is not None):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def run_watched(
    command: list[str], environment: dict[str, str], folder: Path, *, timeout_s: float = 60.0, quiet_s: float = 1.0
) -> tuple[DeviceTrace, str]:
    """Runs a program on the fake devices; its trace, and the deadlock that ended it ("": none). Raises where it fails.

    A deadlock is looked for where nothing has changed on any device for `quiet_s`.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, env={**environment, "FAKE_CUDA_TRACE": str(folder)}, stdout=output, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + timeout_s
        size, since = -1, time.monotonic()
        try:
            while process.poll() is None:
                time.sleep(0.05)
                now = sum(path.stat().st_size for path in folder.glob("*.trace"))
                if now != size:
                    size, since = now, time.monotonic()
                elif time.monotonic() - since > quiet_s:
                    if found := DeviceTrace(folder).deadlock():
                        return DeviceTrace(folder), found
                    since = time.monotonic()
                if time.monotonic() > deadline:
                    output.seek(0)
                    raise AssertionError(f"not finished after {timeout_s} s:\n{output.read()}")
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        output.seek(0)
        assert process.returncode == 0, output.read()
    return DeviceTrace(folder), ""
