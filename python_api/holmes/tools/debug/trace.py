"""The flight records of a job and its ranks' timelines as one trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from holmes.tools.debug.clocks import host_clocks
from holmes.tools.debug.members import JobRecord, Member
from holmes.tools.debug.record import Link, Operation, View
from holmes_comm.errors import UsageError

__all__ = ["chrome_trace", "read_timeline"]

Event = dict[str, Any]
#: The process that links are shown as: no rank.
LINKS = 1 << 30


def read_timeline(path: Path) -> dict[str, Any]:
    """What `DistributedOptimizer.tracing` wrote. Raises UsageError naming the file where it is something else."""
    try:
        found = json.loads(path.read_text())
        if isinstance(found["traceEvents"], list) and {"host", "pid", "to_wall_s"} <= found["otherData"].keys():
            return dict(found)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UsageError(f"{path} is no timeline of an optimizer's tracing(); name the files that it wrote")


def chrome_trace(job: JobRecord, timelines: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A process for each rank, in it a track for each group and its NIC, and those of the rank's timeline.

    Times are microseconds since the first event, on the clock of the first rank's host; `otherData` says by how much
    the others were moved, and how sure that is. What has not ended goes to the time of the record, with `unfinished`.
    Operations of one track that overlap without one being in the other take tracks of their own. A process of its own
    has what all ranks together send over each link between clusters, and each rank its part, since the first event or
    as long as they know. Raises UsageError where a timeline is of no process of the job.
    """
    clocks = host_clocks(job)
    tracks: dict[int, dict[str, list[Event]]] = {}
    for member in job.members:
        for view in member.record.views if member.record else ():
            for operation in view.recent:
                track = tracks.setdefault(member.number, {}).setdefault(f"{view.name} {_nics(view, operation)}", [])
                track.append(_event(view, operation, clocks[member.host].ahead_s))
    for timeline in timelines:
        origin = timeline["otherData"]
        rank = _member_of(job, origin["host"], origin["pid"]).number
        shift_s = origin["to_wall_s"] - clocks[origin["host"]].ahead_s
        for lane, events in _lanes(timeline["traceEvents"]).items():
            moved = [{**event, "ts": event["ts"] + shift_s * 1e6, "cat": "step"} for event in events]
            tracks.setdefault(rank, {}).setdefault(f"step: {lane}", []).extend(moved)
    starts = [event["ts"] for each in tracks.values() for events in each.values() for event in events]
    first = min(starts, default=0.0)
    counters = list(_counters(job, {host: clock.ahead_s for host, clock in clocks.items()}, first))
    start = min(starts + [event["ts"] for event in counters], default=0.0)
    events = [event for member in job.members for event in _process(member, tracks.get(member.number, {}), start)]
    events += [{**event, "ts": round(event["ts"] - start, 3)} for event in counters]
    if counters:
        events.append(_name("process_name", LINKS, 0, "links between clusters"))
        events.append(_sorted("process_sort_index", LINKS, 0, -1))
    shifts = {host: {"ahead_s": clock.ahead_s, "error_s": clock.error_s} for host, clock in clocks.items()}
    other = {"clocks": shifts, "start_unix_s": start / 1e6}
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}


def _process(member: Member, tracks: Mapping[str, list[Event]], start: float) -> Iterator[Event]:
    pid = member.number
    yield _name("process_name", pid, 0, f"rank {pid} ({member.host}" + ("" if member.record else ", no record") + ")")
    yield _sorted("process_sort_index", pid, 0, pid)
    tid = 0
    for title, events in sorted(tracks.items(), key=lambda item: (not item[0].startswith("step: "), item[0])):
        # As they are written: wall-clock time in microseconds is too coarse to tell what overlaps.
        placed = [{**event, "ts": round(event["ts"] - start, 3)} for event in events]
        for number, nested in enumerate(_apart(placed)):
            tid += 1
            yield _name("thread_name", pid, tid, title if number == 0 else f"{title} ({number + 1})")
            yield _sorted("thread_sort_index", pid, tid, tid)
            for event in nested:
                yield {**event, "pid": pid, "tid": tid}


def _name(kind: str, pid: int, tid: int, text: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": text}}


def _sorted(kind: str, pid: int, tid: int, index: int) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"sort_index": index}}


#: A value from some time on, until the next one.
Step = tuple[float, float]


class _Steps(NamedTuple):
    """Mbit/s, milliseconds of a round trip (0 while nothing is under way), and stalled connections."""

    rates: list[Step]
    round_trips: list[Step]
    stalled: list[Step]


def _counters(job: JobRecord, ahead_s: Mapping[str, float], first: float) -> Iterator[Event]:
    """`first`: microseconds of the first event; what was before is left out, unless there is none (0)."""
    found: dict[tuple[str, str], list[_Steps]] = {}
    for member in job.members:
        for link in member.record.links if member.record else ():
            steps = _steps(link, ahead_s[member.host], first)
            found.setdefault((link.here, link.there), []).append(steps)
            yield from _counter(member.number, f"{link.nic} to {link.there}, Mbit/s", steps.rates)
    for (here, there), each in found.items():
        name = f"{here} to {there}"
        yield from _counter(LINKS, f"{name}, Mbit/s", _together([steps.rates for steps in each], sum))
        round_trips = _together([steps.round_trips for steps in each], max)
        yield from _counter(LINKS, f"{name}, round trip ms", [step for step in round_trips if step[1] > 0])
        yield from _counter(LINKS, f"{name}, stalled", _together([steps.stalled for steps in each], sum))


def _counter(pid: int, name: str, steps: Iterable[Step]) -> Iterator[Event]:
    unit = name.rpartition(", ")[2]
    for at, value in steps:
        yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at, "args": {unit: round(value, 3)}}


def _steps(link: Link, ahead_s: float, first: float) -> _Steps:
    found = _Steps([], [], [])
    for before, after in pairwise(link.samples):
        at, end = ((sample.at_s - ahead_s) * 1e6 for sample in (before, after))
        at = max(at, first)
        if end <= at:
            continue
        found.rates.append((at, 8e-6 * (after.sent_bytes - before.sent_bytes) / (after.at_s - before.at_s)))
        found.round_trips.append((end, after.round_trip_s * 1e3))
        found.stalled.append((end, float(after.stalled)))
    if found.stalled:
        found.rates.append((found.stalled[-1][0], 0.0))
    return found


def _together(each: Sequence[list[Step]], join: Callable[[Iterable[float]], float]) -> Iterator[Step]:
    """What it is of all of them, at each time that one of them changes."""
    now = [0.0] * len(each)
    changes = sorted((at, number, value) for number, steps in enumerate(each) for at, value in steps)
    for (at, number, value), (then, _, _) in pairwise([*changes, (float("inf"), 0, 0.0)]):
        now[number] = value
        if then > at:
            yield at, join(now)


def _event(view: View, operation: Operation, ahead_s: float) -> Event:
    end_s = operation.finished_s if operation.finished_s is not None else view.taken_s
    args: dict[str, Any] = {"bytes": operation.bytes, "dtype": operation.dtype, "state": operation.state}
    for key in ("root", "peer", "reduction"):
        if (value := getattr(operation, key)) is not None:
            args[key] = value
    if operation.started_s is not None:
        args["queued_us"] = round((operation.started_s - operation.queued_s) * 1e6, 3)
    if operation.finished_s is None:
        args["unfinished"] = True
    if operation.state == "failed" and view.failure is not None:
        args["error"] = view.failure.message
    return {
        "ph": "X",
        "name": operation.title,
        "cat": "collective" if operation.is_collective else "message",
        "ts": (operation.queued_s - ahead_s) * 1e6,
        "dur": round(max(0.0, end_s - operation.queued_s) * 1e6, 3),
        "args": args,
    }


def _nics(view: View, operation: Operation) -> str:
    """What it went over: the peer's NIC of a message, all of a collective."""
    ranks = view.ranks if operation.peer is None or operation.is_collective else [view.ranks[operation.peer]]
    return f"({'+'.join(sorted({rank.nic for rank in ranks if rank.nic})) or 'no NIC'})" if view.ranks else "(set-up)"


def _apart(events: list[Event]) -> list[list[Event]]:
    """In order of time, on as few tracks as it takes for those of one track to follow or contain each other."""
    tracks: list[tuple[list[Event], list[float]]] = []  # with the ends of what is open there
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        end = event["ts"] + event["dur"]
        place = next((place for place in tracks if _has_room(place[1], event["ts"], end)), None)
        if place is None:
            place = ([], [])
            tracks.append(place)
        place[0].append(event)
        place[1].append(end)
    return [track for track, _ in tracks]


def _has_room(open_ends: list[float], start: float, end: float) -> bool:
    while open_ends and open_ends[-1] <= start:
        open_ends.pop()
    return not open_ends or end <= open_ends[-1]


def _lanes(events: list[Event]) -> dict[str, list[Event]]:
    names = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    found: dict[str, list[Event]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault(names[event["tid"]], []).append(event)
    return found


def _member_of(job: JobRecord, host: str, pid: int) -> Member:
    for member in job.members:
        if (member.host, member.pid) == (host, pid):
            return member
    raise UsageError(f"a timeline is of process {pid} on host {host}, of which there is no flight record")
