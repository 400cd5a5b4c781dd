"""Processes of this machine, by their command line."""

from __future__ import annotations

from pathlib import Path


def processes_with(words: str) -> list[int]:
    """The numbers of those whose command line has these words."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if words.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def processes_that_hold(path: str) -> dict[int, str]:
    """Those that have this file or folder open, with their command lines; of other users' none may be seen."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(held.readlink()) == path for held in (entry / "fd").iterdir()):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found
