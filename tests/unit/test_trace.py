"""The trace of all ranks: clocks put together by what hosts did together, tracks, and the format's rules."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_communicators
from test_debug_units import NOW_S, operation, process, view

import holmes_comm
from holmes.tools.debug.clocks import host_clocks
from holmes.tools.debug.members import JobRecord, jobs_of
from holmes.tools.debug.record import ProcessRecord
from holmes.tools.debug.trace import chrome_trace, read_timeline
from holmes_comm import UsageError


def job_of(*records: ProcessRecord) -> JobRecord:
    (job,) = jobs_of(records)
    return job


def ended(op: str, sequence: int, queued_s: float, finished_s: float, **fields: Any) -> dict[str, Any]:
    times = {"queued_s": NOW_S + queued_s, "started_s": NOW_S + queued_s, "finished_s": NOW_S + finished_s}
    return operation(op, sequence, state="completed", **times, **fields)


def ahead(record: ProcessRecord, seconds: float) -> ProcessRecord:
    """The same, of a host whose clock is ahead."""

    def moved(one: Any) -> Any:
        return replace(one, queued_s=one.queued_s + seconds, finished_s=one.finished_s + seconds)

    views = tuple(replace(each, recent=tuple(map(moved, each.recent))) for each in record.views)
    return replace(record, views=views, to_wall_s=record.to_wall_s + seconds)


def test_a_clock_that_is_ahead_is_found_by_collectives_and_by_a_chain_of_messages() -> None:
    together = [ended("all_reduce", n, -n, -n + 0.01) for n in (3, 2, 1)]
    there = [ended("send", 0, -5, -4.9, peer=1), ended("recv", 1, -3, -2.9, peer=1)]
    back = [ended("recv", 0, -5, -4.9, peer=0), ended("send", 1, -3, -2.9, peer=0)]
    first = process(0, view(0, 2, [], operations=together), view(0, 2, [], name="pp", operations=there))
    pp1 = view(1, 2, [], name="pp2", operations=there)
    second = process(1, view(1, 2, [], operations=together), view(1, 2, [], name="pp", operations=back), pp1)
    clocks = host_clocks(job_of(first, ahead(second, 7.5)))
    assert clocks["h0"].ahead_s == 0
    assert clocks["h1"].ahead_s == pytest.approx(7.5, abs=0.01)
    assert clocks["h1"].error_s == pytest.approx(0.01, abs=1e-6)
    # By messages alone, each of which bounds one side.
    only = [process(0, view(0, 2, [], operations=there)), process(1, view(1, 2, [], operations=back))]
    clocks = host_clocks(job_of(only[0], ahead(only[1], -2.0)))
    assert clocks["h1"].ahead_s == pytest.approx(-2.0, abs=0.1)
    # Where the first messages are forgotten nothing is sure.
    late = [{**each, "sequence": each["sequence"] + 9} for each in there]
    assert host_clocks(job_of(process(0, view(0, 2, [], operations=late)), only[1]))["h1"].error_s is None


def test_clocks_that_may_agree_are_left_alone() -> None:
    records = [process(rank, view(rank, 2, [], operations=[ended("barrier", 1, -2, -1)])) for rank in range(2)]
    assert host_clocks(job_of(records[0], ahead(records[1], 0.3)))["h1"].ahead_s == 0


def checked(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The events of each track, by the format's rules: what Perfetto's importer drops or misplaces otherwise."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    names = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in ("X", "M", "C")
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                names.add((event["pid"], event["tid"]))
            continue
        assert event["ts"] >= 0
        if event["ph"] == "C":
            (value,) = event["args"].values()
            assert value >= 0
            continue
        assert event["dur"] >= 0
        tracks[event["pid"], event["tid"]].append(event)
    assert names == set(tracks)
    for events in tracks.values():
        open_ends: list[float] = []
        for event in events:
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1] + 1e-2  # overlaps are not nested
            open_ends.append(event["ts"] + event["dur"])
    return tracks


def test_tracks_of_ranks_groups_and_what_overlaps() -> None:
    running = operation("all_reduce", 9, queued_s=NOW_S - 1, started_s=NOW_S - 0.9, state="running")
    overlapping = [ended("all_reduce", 7, -5, -3), ended("all_reduce", 8, -4, -2), running]
    records = [process(rank, view(rank, 2, [], operations=overlapping)) for rank in range(2)]
    trace = chrome_trace(job_of(*records))
    tracks = checked(trace)
    titles = [event["args"]["name"] for event in trace["traceEvents"] if event["name"].endswith("_name")]
    assert titles[:3] == ["rank 0 (h0)", "dp0 (eth0)", "dp0 (eth0) (2)"]
    assert [event["name"] for event in tracks[1, 1]] == ["all_reduce #7", "all_reduce #9"]
    last = tracks[1, 1][-1]
    assert last["args"]["unfinished"] is True
    assert last["ts"] + last["dur"] == pytest.approx(5e6, abs=1)  # when the record was made
    assert last["args"]["queued_us"] == pytest.approx(1e5, abs=1)


def link(*samples: tuple[float, int, float, int], there: str = "cluster b") -> dict[str, Any]:
    """`samples`: seconds before the record, bytes sent until then, round trip in seconds, stalled connections."""
    columns = ["at_s", "sent_bytes", "round_trip_s", "stalled"]
    rows = [[NOW_S + at_s, *rest] for at_s, *rest in samples]
    return {"nic": "eth0", "from": "cluster a", "to": there, "columns": columns, "samples": rows}


def counters(trace: dict[str, Any]) -> dict[tuple[int, str], list[tuple[float, float]]]:
    found: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "C":
            (value,) = event["args"].values()
            found[event["pid"], event["name"]].append((event["ts"] * 1e-6, value))
    return dict(found)


def test_a_link_is_a_track_of_all_ranks_that_use_it() -> None:
    calls = [ended("all_reduce", 7, -4, -1)]
    mega = 125_000  # bytes of a Mbit
    one = link((-60, 0, 0, 0), (-5, 5 * mega, 0.02, 0), (-3, 25 * mega, 0.04, 1), (-1, 25 * mega, 0, 0))
    two = link((-4, 0, 0, 0), (-2, 60 * mega, 0.03, 2))
    records = [process(rank, view(rank, 2, [], operations=calls), links=[each]) for rank, each in enumerate((one, two))]
    trace = chrome_trace(job_of(records[0], records[1]))
    checked(trace)
    found = counters(trace)
    links = next(
        event["pid"] for event in trace["traceEvents"] if event["args"].get("name") == "links between clusters"
    )
    # From the first operation on; what was sent in an interval was sent evenly. The two overlap from 0 s to 1 s.
    assert found[0, "eth0 to cluster b, Mbit/s"] == [(0, 10), (1, 0), (3, 0)]
    assert found[1, "eth0 to cluster b, Mbit/s"] == [(0, 30), (2, 0)]
    assert found[links, "cluster a to cluster b, Mbit/s"] == [(0, 40), (1, 30), (2, 0), (3, 0)]
    assert found[links, "cluster a to cluster b, round trip ms"] == [(1, 40), (2, 40), (3, 30)]
    assert found[links, "cluster a to cluster b, stalled"] == [(1, 1), (2, 3), (3, 2)]
    # Links that were looked at later than the first operation, in a process that has many behind it.
    early = process(0, view(0, 1, [], operations=[ended("barrier", 1, -20, -19)]), links=[two])
    assert min(at for steps in counters(chrome_trace(job_of(early))).values() for at, _ in steps) > 10
    # Where nothing is recorded but links: as long as they know.
    alone = counters(chrome_trace(job_of(process(0, view(0, 1, []), links=[two]))))
    assert alone[0, "eth0 to cluster b, Mbit/s"] == [(0, 30), (2, 0)]
    # Of a record of before there were any: nothing.
    assert counters(chrome_trace(job_of(process(0, view(0, 1, [], operations=calls))))) == {}


def test_a_real_record_and_a_timeline_are_one_trace(tmp_path: Path) -> None:
    from holmes.training.overlap.timeline import Timeline

    def body(comm: Any) -> dict[str, Any]:
        for _ in range(3):
            comm.all_reduce(np.ones(1000))
        comm.barrier()
        record = holmes_comm.flight_record() if comm.rank == 0 else {}
        comm.barrier()
        return record

    timeline = Timeline()
    timeline.is_recording = True
    with timeline.span("compute", "forward"):
        record = ProcessRecord.from_dict(run_communicators(2, body)[0])
    timeline.save(tmp_path / "steps.json", rank=0)
    steps = read_timeline(tmp_path / "steps.json")
    job = job_of(record)
    trace = chrome_trace(job, [steps])
    tracks = checked(trace)
    (forward,) = [event for events in tracks.values() for event in events if event["name"] == "forward"]
    inside = [
        e for events in tracks.values() for e in events if e["name"] == "all_reduce #3" and e["ts"] > forward["ts"]
    ]
    assert inside
    assert all(event["ts"] + event["dur"] < forward["ts"] + forward["dur"] for event in inside)
    stranger = {**steps, "otherData": {**steps["otherData"], "pid": 1}}
    with pytest.raises(UsageError, match=r"a timeline is of process 1 on host .*, of which there is no flight record"):
        chrome_trace(job, [stranger])


def test_what_is_no_timeline_is_refused(tmp_path: Path) -> None:
    for text in ("[]", "no json", '{"traceEvents": []}'):
        (tmp_path / "t.json").write_text(text)
        with pytest.raises(UsageError, match=r"t\.json is no timeline of an optimizer's tracing"):
            read_timeline(tmp_path / "t.json")
