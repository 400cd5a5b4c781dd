"""Merging flight records: made-up jobs, and what is said of each. Also the metrics' text and the folder of records."""

from __future__ import annotations

import contextlib
import json
import socket
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from ranks import run_communicators
from typer.testing import CliRunner

import holmes_comm
from holmes.tools.cli import debug as cli_debug
from holmes.tools.debug import ProcessRecord, diagnose, read_folder, sources
from holmes.tools.debug.sources import Silent
from holmes_comm.metrics_server import serve_metrics

NOW_S = 100.0
WALL_S = 1_000_000.0


def operation(op: str, sequence: int, **fields: Any) -> dict[str, Any]:
    """As the engine writes it; called 10 s ago unless said otherwise."""
    collective = op not in ("send", "recv")
    usual = {
        "number": sequence + 1,
        "op": op,
        "collective": collective,
        "sequence": sequence,
        "dtype": "float32",
        "count": 1000,
        "bytes": 4000,
        "reduction": "sum" if op == "all_reduce" else None,
        "root": None,
        "peer": None,
        "tag": 0,
        "queued_s": NOW_S - 10,
        "started_s": None,
        "finished_s": None,
    }
    return {**usual, **fields}


def pending(op: str, sequence: int, peers: Sequence[tuple[int, bool, int, int, int, int]] = (), **fields: Any) -> Any:
    """`peers`: peer, heard, bytes received, to receive, sent, to send."""
    keys = ("peer", "heard", "received_bytes", "to_receive_bytes", "sent_bytes", "to_send_bytes")
    rows = [dict(zip(keys, row, strict=True)) for row in peers]
    fields.setdefault("peer", rows[0]["peer"] if rows and op in ("send", "recv") else None)
    return {"running": True, "awaited": True, **operation(op, sequence, **fields), "peers": rows}


def view(rank: int, size: int, waits: list[Any], *, name: str = "dp0", entered: int = 6, **fields: Any) -> Any:
    ranks = [
        {"host": f"h{r}", "nic": "" if r == rank else f"eth{rank}", "pid": 100 + r, "job_rank": r} for r in range(size)
    ]
    messages = [{"sent": 0, "arrived": 0, "lost": False}] * size
    state = {"taken_s": NOW_S, "pending_count": len(waits), "pending": waits, "messages": messages}
    usual = {
        "name": f"holmes/{name}",
        "id": name,
        "backend": "host",
        "rank": rank,
        "size": size,
        "entered": entered,
        "failure": None,
        "ranks": ranks,
        "state": state,
        "operations": [],
    }
    return {**usual, **fields}


def process(rank: int, *views: Any, at: str = "train.py:41 in load_batch", **fields: Any) -> ProcessRecord:
    data = {
        "kind": "holmes-flight-record",
        "version": 1,
        "host": f"h{rank}",
        "pid": 100 + rank,
        "job_rank": rank,
        "testbed": False,
        "reason": "test",
        "monotonic_s": NOW_S,
        "wall_s": WALL_S,
        "communicators": list(views),
        "stacks": [{"thread": "MainThread", "is_main": True, "frames": [at]}],
        **fields,
    }
    return ProcessRecord.from_dict(data)


def test_idle_and_working_jobs_have_nothing_to_say() -> None:
    assert diagnose([process(0, view(0, 2, [])), process(1, view(1, 2, []))]) == []
    # A receive that was posted ahead, and that nobody waits for.
    ahead = {**pending("recv", 0, [(1, False, 0, 40, 0, 0)]), "awaited": False, "queued_s": NOW_S - 0.1}
    assert diagnose([process(0, view(0, 2, [ahead])), process(1, view(1, 2, []))]) == []


def test_chain_of_waits_has_one_cause() -> None:
    """0 and 3 wait in dp0 for 1, which is in a recv from 2, which computes."""
    stuck = pending("all_reduce", 5, [(1, False, 0, 4000, 0, 4000)])
    records = [
        process(0, view(0, 4, [stuck])),
        process(1, view(1, 4, [], entered=5), view(1, 4, [pending("recv", 40, [(2, False, 0, 40, 0, 0)])], name="pp")),
        process(2, view(2, 4, [stuck]), view(2, 4, [], name="pp")),
        process(3, view(3, 4, [stuck])),
    ]
    # Rank 2 has called the all_reduce without waiting for it.
    records[2] = process(2, view(2, 4, [{**stuck, "awaited": False}]), view(2, 4, [], name="pp"))
    cause, follows = diagnose(records)
    assert (cause.kind, cause.culprits, cause.operation, cause.group) == ("absent", (2,), "recv #40", "pp")
    assert "rank 2 (host h2, NIC eth2) has not called the send for recv #40 from rank 2 of group pp" in cause.sentence
    assert "rank 2 is in no operation: its program is at train.py:41 in load_batch" in cause.sentence
    assert (follows.culprits, follows.waiting, follows.is_cause) == ((1,), (0, 3), False)
    assert "rank 1 is in recv #40 from rank 2 of group pp and waits there for rank 2" in follows.sentence
    assert "ranks 0, 3 wait in it for 10.0 s" in follows.sentence


def test_stopped_process_that_has_begun_the_operation() -> None:
    stuck = pending("all_reduce", 5, [(1, True, 1000, 4000, 2000, 4000)])
    records = [process(0, view(0, 2, [stuck]))]
    (finding,) = diagnose(records, [Silent(101, "h1", "stopped")])
    assert (finding.kind, finding.culprits) == ("absent", (1,))
    assert "process 101 is stopped" in finding.sentence
    (finding,) = diagnose(records)
    assert finding.culprits in [(0, 1), (1,)]


def test_link_between_two_that_both_wait() -> None:
    """Three ranks; what 1 and 2 send each other is lost; 0 has all it needs of them but waits for their steps."""
    records = [
        process(0, view(0, 3, [pending("all_reduce", 5, [(1, True, 100, 200, 200, 200)])])),
        process(
            1, view(1, 3, [pending("all_reduce", 5, [(2, False, 0, 4000, 4000, 4000), (0, True, 200, 200, 100, 200)])])
        ),
        process(2, view(2, 3, [pending("all_reduce", 5, [(1, True, 1500, 4000, 4000, 4000)])])),
    ]
    (finding,) = diagnose(records)
    assert (finding.kind, finding.culprits, finding.nics) == ("link", (1, 2), ("eth2", "eth1"))
    assert "4000 bytes that rank 2 sent for all_reduce #5 of group dp0 have not arrived at rank 1" in finding.sentence


def test_message_that_was_sent_and_does_not_arrive() -> None:
    sender = view(1, 2, [])
    sender["state"]["messages"] = [{"sent": 1, "arrived": 0, "lost": False}, {"sent": 0, "arrived": 0, "lost": False}]
    records = [process(0, view(0, 2, [pending("recv", 0, [(1, False, 0, 40, 0, 0)])])), process(1, sender)]
    (finding,) = diagnose(records)
    assert (finding.kind, finding.culprits) == ("link", (0, 1))


def test_what_was_before_a_recovery_is_history() -> None:
    failure = {"error": "PeerLostError", "message": "rank 1 is lost", "rank": 0, "peer": 1, "host": "h1", "nic": "eth0"}
    old = view(0, 2, [pending("all_reduce", 5)], name="old", failure=failure)
    (finding,) = diagnose([process(0, old)])
    assert (finding.kind, finding.culprits, finding.operation) == ("lost", (1,), "all_reduce #5")
    assert "rank 1 (host h1, NIC eth0) is gone: its process 101 has ended; rank 0 lost it" in finding.sentence
    later = {**operation("all_reduce", 1, queued_s=NOW_S + 1), "state": "completed", "finished_s": NOW_S + 2}
    new = view(0, 1, [], name="new", operations=[later])
    assert diagnose([process(0, old, new)]) == []


def test_folder_of_records_and_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.json").write_text("not JSON")
    (tmp_path / "c.json").write_text("[]")
    record = {"kind": "holmes-flight-record", "version": 1, "wall_s": 1, "monotonic_s": 0, "stacks": []}
    for name, wrong in {"d": {}, "e": {"communicators": [3]}, "f": {"stacks": 3}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record | wrong))
    (tmp_path / "g.json").write_text("[" * 100_000)
    answers = read_folder(tmp_path)
    assert answers.records == ()
    assert [note.split(": ")[0] for note in answers.notes] == [f"{tmp_path}/{name}.json" for name in "abcdefg"]
    assert "expected kind 'holmes-flight-record' of version 1" in answers.notes[0]
    assert "got a list" in answers.notes[2]
    assert all("not as a flight record is written" in note for note in answers.notes[3:])


def test_flight_record_and_metrics_of_this_process() -> None:
    def body(comm: Any) -> list[dict[str, Any]]:
        comm.all_reduce(np.ones(100, "float32"))
        comm.send(np.ones(5), 1, 7) if comm.rank == 0 else comm.recv(np.ones(5), 0, 7)
        comm.barrier()
        return comm.flight_record()

    before = sum(m.completed for m in holmes_comm.metrics().operations if m.op == "all_reduce")
    for rank, operations in enumerate(run_communicators(2, body)):
        # The first one is the set-up's own.
        assert [(o["op"], o["sequence"], o["state"]) for o in operations[1:]] == [
            ("all_reduce", 1, "completed"),
            (("send", "recv")[rank], 0, "completed"),
            ("barrier", 2, "completed"),
        ]
        assert (operations[1]["count"], operations[1]["bytes"], operations[1]["reduction"]) == (100, 400, "sum")
        assert (operations[2]["peer"], operations[2]["tag"], operations[2]["nics"]) == (1 - rank, 7, ["lo"])
        times = [operations[1][key] for key in ("queued_s", "started_s", "finished_s")]
        assert times == sorted(times)
    metrics = holmes_comm.metrics()
    assert sum(m.completed for m in metrics.operations if m.op == "all_reduce") == before + 2
    group = next(m.group for m in metrics.nics if m.nic == "lo")
    text = metrics.to_prometheus()
    assert "# TYPE holmes_sent_bytes_total counter" in text
    assert f'holmes_sent_bytes_total{{group="{group}",nic="lo"' in text
    assert json.loads(metrics.to_json())["nics"]


def test_metrics_over_http_on_loopback() -> None:
    server = serve_metrics(0)
    try:
        host, port = server.server_address[:2]
        assert host == "127.0.0.1"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert b"holmes_communicators" in answer.read()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics.json", timeout=10) as answer:
            assert "operations" in json.load(answer)
    finally:
        server.shutdown()


def test_signal_without_a_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLMES_FLIGHT_RECORDER_SIGNAL", "USR1")
    with pytest.raises(holmes_comm.UsageError, match="HOLMES_FLIGHT_RECORDER_DIR"):
        run_communicators(1, lambda comm: None)


def test_ranks_that_wait_in_a_set_up_name_those_that_did_not_come() -> None:
    waiting = [process(rank, view(rank, 3, [], id="0", ranks=[], state=None)) for rank in (0, 2)]
    (finding,) = diagnose(waiting)
    assert (finding.kind, finding.culprits, finding.waiting, finding.is_cause) == ("absent", (1,), (0, 2), True)
    assert "of 3 ranks of group dp0, [1] did not come to its set-up, where [0, 2] wait" in finding.sentence
    complete = [process(rank, view(rank, 3, [], id="0", ranks=[], state=None)) for rank in range(3)]
    assert diagnose(complete) == []


def test_a_process_that_was_not_asked_is_not_said_to_have_ended() -> None:
    asked = process(0, view(0, 2, [pending("all_reduce", 5, [(1, False, 0, 4000, 0, 4000)])]))
    (finding,) = diagnose([asked], [Silent(101, "h1", "unasked")])
    assert "its process 101 runs, but was not asked: name it too, or no process at all" in finding.sentence
    assert "ended" not in finding.sentence


def test_a_process_that_takes_no_more_questions_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped one, asked so often that its queue is full; its number is another one's here."""
    monkeypatch.setattr(sources, "_folders", lambda: [tmp_path])
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as asking:
        listener.bind(str(tmp_path / "4194304999-h0-7.sock"))
        listener.listen(0)
        for _ in range(3):
            client = asking.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(str(tmp_path / "4194304999-h0-7.sock"))
        answers = sources.ask_processes()
    assert answers.silent == (Silent(4194304999, "h0", "busy"),)
    assert answers.notes == ()


def test_a_process_that_starts_while_others_are_asked_is_asked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be in the others' records already, and would pass for one that has ended."""
    monkeypatch.setattr(sources, "_folders", lambda: [tmp_path])
    asked: list[str] = []

    def ask(path: Path, pids: object) -> Silent | None:
        asked.append(path.name)
        if path.name == "1-h0-0.sock":
            (tmp_path / "2-h1-0.sock").touch()
        if path.name == "2-h1-0.sock" and asked.count(path.name) == 1:
            (tmp_path / "3-h2-0.sock").touch()
            return None  # it does not listen yet
        return Silent(int(path.name[0]), "h", "busy")

    monkeypatch.setattr(sources, "_ask", ask)
    (tmp_path / "1-h0-0.sock").touch()
    assert [silent.name_pid for silent in sources.ask_processes().silent] == [1, 2, 3]
    assert [asked.count(name) for name in sorted(set(asked))] == [1, 2, 1]


def test_every_job_that_runs_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = [process(0, view(0, 2, [], name="dp0")), process(1, view(1, 2, [], name="dp0"))]
    other = [process(0, view(0, 2, [], name="eval")), process(1, view(1, 2, [], name="eval"))]
    answers = sources.Answers((*hung, *other))
    monkeypatch.setattr(cli_debug, "ask_processes", lambda pids, testbed_only: answers)
    monkeypatch.setattr(cli_debug, "read_folder", lambda folder: answers)
    app = typer.Typer()
    app.command()(cli_debug.debug)
    said = "2 processes on 2 hosts, 2 told; 1 communicator"
    for places, jobs in (([], 2), (["100", "101"], 2), ([str(tmp_path)], 1), ([str(tmp_path), "--all"], 2)):
        run = CliRunner().invoke(app, places)
        assert run.output.count(said) == jobs, run.output
