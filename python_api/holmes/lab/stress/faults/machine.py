"""What a result was measured on."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from typing import Any

import holmes_comm


def _without_save(words: list[str]) -> list[str]:
    """A path is of one machine."""
    at = words.index("--save") if "--save" in words else len(words)
    return words[:at] + words[at + 2 :]


def describe_machine() -> dict[str, Any]:
    """Processors, kernel, versions, load and date, for result files; no names of hosts."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "processors": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "holmes_comm": holmes_comm.__version__,
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "command": " ".join(["holmes", *_without_save(sys.argv[1:])]),
    }
