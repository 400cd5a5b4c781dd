"""The flight record of this process: what its communicators did, what they wait for, where its threads are."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

__all__ = ["flight_record", "operations", "short_name", "stacks_json"]

_MOST_FRAMES = 12
_PREFIX = "holmes/"


def short_name(communicator: str) -> str:
    """A communicator's name as its user gave it: ``init`` puts "holmes/" in front."""
    return communicator.removeprefix(_PREFIX)


def flight_record(reason: str = "asked for") -> dict[str, Any]:
    """The record of this process, of kind "holmes-flight-record" (docs/debug.md), as plain dicts and lists. Local.

    Takes some milliseconds while operations run, at most about 0.6 s where a thread does not answer.
    """
    from holmes_comm import _C

    record: dict[str, Any] = json.loads(_C.process_record(reason))
    return record


def operations(communicators: str) -> list[dict[str, Any]]:
    """The operations in a JSON list of communicators' records, oldest first: what ``Communicator.flight_record`` gives.

    ``waiting_for`` is there for operations that are not finished: dicts of peer, host, nic, heard (something of it has
    come) and the bytes of both directions; None where the thread that drives the communicator did not answer.
    """
    import time

    to_wall_s = time.time() - time.monotonic()
    found = []
    for record in json.loads(communicators):
        ranks = record["ranks"]
        state = record["state"]
        waits = {entry["number"]: entry["peers"] for entry in state["pending"]} if state else None
        nics = sorted({rank["nic"] for rank in ranks if rank["nic"]})
        for operation in record["operations"]:
            number = operation.pop("number")
            operation.pop("collective")
            peer = operation["peer"]
            operation["communicator"] = short_name(record["name"])
            operation["nics"] = nics if peer is None or not ranks else [ranks[peer]["nic"]]
            operation["queued_wall_s"] = operation["queued_s"] + to_wall_s
            if operation["state"] in ("queued", "running"):
                operation["waiting_for"] = None if waits is None else [_named(p, ranks) for p in waits.get(number, [])]
            found.append(operation)
    return sorted(found, key=lambda operation: float(operation["queued_s"]))


def _named(progress: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    rank = ranks[progress["peer"]] if ranks else {"host": "", "nic": ""}
    return {**progress, "host": rank["host"], "nic": rank["nic"]}


def stacks_json() -> str:
    """Where the Python threads of this process are, as JSON: thread, is_main, frames ("file:line in function")."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    stacks = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        frames: list[str] = []
        here: Any = frame
        while here is not None and len(frames) < _MOST_FRAMES:
            frames.append(f"{here.f_code.co_filename}:{here.f_lineno} in {here.f_code.co_name}")
            here = here.f_back
        stacks.append({"thread": names.get(ident, str(ident)), "is_main": ident == main, "frames": frames})
    return json.dumps(sorted(stacks, key=lambda stack: not stack["is_main"]))
