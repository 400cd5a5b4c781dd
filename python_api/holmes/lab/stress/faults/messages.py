"""What rank processes tell the driver: JSON lines on stdout, among whatever else is printed."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: A rank that gets it prints the stacks of its Python threads.
STACKS_SIGNAL = signal.SIGUSR2
_MARK = "@holmes-stress "
_MAX_TEXT = 900  # of three groups: a line of less than 4 KiB is written to a pipe in one piece
_lock = threading.Lock()


@dataclass(frozen=True)
class GroupReport:
    """How one group ended on one rank.

    `error`: name of the class, empty where all was right; `culprit`: the job's rank that it names, None where it names
    none; `cause` and `reporter`: class of the first error and the rank that saw it, where this one only heard of it.
    `reported_s`: time.monotonic, one clock for all ranks of a machine; `operations` were checked and right.
    """

    kind: str
    ranks: tuple[int, ...]
    operations: int
    checked_bytes: int
    reported_s: float
    error: str = ""
    cause: str = ""
    culprit: int | None = None
    reporter: int = -1
    host: str = ""
    nic: str = ""
    message: str = ""
    round: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return dataclasses.asdict(self) | {"message": self.message[:_MAX_TEXT]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GroupReport:
        """The inverse of `to_dict`."""
        return cls(**{**data, "ranks": tuple(data["ranks"])})


def tell(event: str, **fields: Any) -> None:
    """Sends one event to the driver. Thread-safe."""
    line = _MARK + json.dumps({"event": event, **fields}) + "\n"
    with _lock:
        sys.stdout.write(line)
        sys.stdout.flush()


def heard(line: str) -> dict[str, Any] | None:
    """The event of an output line, None where it is something else (a warning, a traceback)."""
    at = line.find(_MARK)
    if at < 0:
        return None
    try:
        event: dict[str, Any] = json.loads(line[at + len(_MARK) :])
    except ValueError:
        return None
    return event
