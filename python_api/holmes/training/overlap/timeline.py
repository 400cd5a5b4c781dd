"""Timeline: the compute and communication lanes of some steps as a Chrome trace (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holmes.training.overlap.transfers import Lane, Transfer
from holmes_comm._C import host_name


class Timeline:
    """Gathers spans while `is_recording`. Times are CLOCK_MONOTONIC seconds. Not thread-safe."""

    def __init__(self) -> None:
        self.is_recording = False
        self._lanes: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []
        self._open: tuple[str, str, float, float] | None = None

    def add(self, lane: str, name: str, start_s: float, end_s: float, **details: Any) -> None:
        """A span on `lane`."""
        if self.is_recording:
            number = self._lanes.setdefault(lane, len(self._lanes))
            span = {"ph": "X", "name": name, "tid": number, "ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
            self._events.append({**span, "args": details})

    def extend(self, lane: str, name: str) -> None:
        """What `name` names goes on until now: opens a span, or lengthens the open one of that name."""
        if not self.is_recording:
            return
        now = time.monotonic()
        if self._open is not None and self._open[:2] == (lane, name):
            self._open = (lane, name, self._open[2], now)
        else:
            self.close_open()
            self._open = (lane, name, now, now)

    def close_open(self) -> None:
        """Ends the open span where it was lengthened last."""
        if self._open is not None:
            self.add(*self._open)
            self._open = None

    def begin(self, lane: str, name: str) -> None:
        """Opens a span, which `end` ends."""
        if self.is_recording:
            self.close_open()
            now = time.monotonic()
            self._open = (lane, name, now, now)

    def end(self) -> None:
        """Ends the open span now."""
        if self._open is not None:
            self._open = (*self._open[:3], time.monotonic())
            self.close_open()

    def add_transfers(self, lane: Lane, transfers: Sequence[tuple[Transfer, float]]) -> None:
        """What a group did, and where the caller stood waiting for it."""
        for transfer, start_s in transfers:
            title = f"{transfer.kind} {transfer.bucket}" if transfer.bucket >= 0 else transfer.kind
            place = f"{lane.label} ({'+'.join(lane.nics)})" if lane.nics else lane.label
            self.add(place, title, start_s, transfer.ended_s or start_s, size_bytes=transfer.size_bytes)
            for wait_start_s, wait_end_s in transfer.waits:
                self.add("exposed", f"wait: {title}", wait_start_s, wait_end_s)

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Times its body."""
        started = time.monotonic()
        yield
        self.add(lane, name, started, time.monotonic())

    def save(self, path: str | Path, rank: int) -> None:
        """Writes what was gathered as one process named after the rank, and forgets it."""
        named = [("process_name", 0, f"rank {rank}"), *(("thread_name", n, lane) for lane, n in self._lanes.items())]
        header = [{"ph": "M", "pid": rank, "tid": tid, "name": key, "args": {"name": name}} for key, tid, name in named]
        events = [{"pid": rank, **event} for event in self._events]
        # By which `holmes debug --trace` finds the process, and turns its clock into everybody's.
        origin = {"host": host_name(), "pid": os.getpid(), "to_wall_s": time.time() - time.monotonic()}
        trace = {"displayTimeUnit": "ms", "otherData": origin, "traceEvents": header + events}
        Path(path).write_text(json.dumps(trace))
        self._events.clear()
