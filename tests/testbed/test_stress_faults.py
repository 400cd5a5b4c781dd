"""Injected faults: the judge of reports, the store and clock of the driver, and whole episodes on the testbed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from namespaces import needs_namespaces
from ranks import run_threads

import holmes_comm
from holmes.lab.stress.cli_faults import names_of
from holmes.lab.stress.faults import FaultSettings
from holmes.lab.stress.faults.catalogue import Injection
from holmes.lab.stress.faults.check import Episode, check_episode
from holmes.lab.stress.faults.expect import SURVIVED, about
from holmes.lab.stress.faults.folder_store import FolderStore
from holmes.lab.stress.faults.leaks import problems
from holmes.lab.stress.faults.messages import GroupReport
from holmes.lab.stress.faults.preloaded import FalseClock
from holmes.lab.stress.faults.reports import first_cause, passed_on, report_of
from holmes.lab.stress.faults.tamper import tampered
from holmes.lab.stress.result import WrongResultError
from holmes_comm import AbortedError, PeerLostError, ProtocolError, UsageError
from holmes_comm import TimeoutError as HolmesTimeoutError

FIELDS = 25  # of a rank's record with one rail

RIGHT = GroupReport("dp", (0, 2), 9, 99, 100.5, "PeerLostError", "PeerLostError", culprit=2, reporter=0, nic="ib0")


def _episode(*reports: GroupReport, injection: Injection | None = None) -> Episode:
    killed = Injection("kill", "rank 2 is killed", about(frozenset({2})))
    by_rank = {rank: [report] for rank, report in enumerate(reports)}
    return Episode(7, [injection or killed], 100.0, 7.0, frozenset({0, 1}), by_rank)


def test_a_report_that_names_the_victim_in_time_is_right() -> None:
    checked = check_episode(_episode(RIGHT, replace(RIGHT, error="AbortedError", reported_s=101.0)))
    assert checked.problems == ()
    assert checked.outcome == "reported"
    assert checked.report_s == {0: 0.5, 1: 1.0}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (replace(RIGHT, culprit=0), "names it wrongly"),
        (replace(RIGHT, culprit=None), "names it wrongly"),
        (replace(RIGHT, cause="MismatchError"), "names it wrongly"),
        (replace(RIGHT, reported_s=108.0), "later than 7 s"),
        (replace(RIGHT, error="WrongResult", cause="WrongResult"), "WrongResult"),
        (replace(RIGHT, error="Hang", cause="Hang"), "Hang"),
        (replace(RIGHT, error="", cause=""), "did not report it"),
    ],
)
def test_any_other_report_is_a_problem(wrong: GroupReport, says: str) -> None:
    assert any(says in problem for problem in check_episode(_episode(RIGHT, wrong)).problems)


def test_silence_false_alarms_and_missing_warnings_are_problems() -> None:
    assert "reported nothing" in check_episode(_episode(RIGHT)).problems[0]
    slow = Injection("nic-slow", "ib0 is slow", SURVIVED)
    assert "must survive" in check_episode(_episode(RIGHT, RIGHT, injection=slow)).problems[0]
    quiet = replace(RIGHT, error="", cause="")
    assert check_episode(_episode(quiet, quiet, injection=slow)).outcome == "survived"
    rail = Injection("nic-down", "ib0 of a0 goes down", replace(SURVIVED, warns=(("a0", "ib0"),)))
    unwarned = _episode(quiet, quiet, injection=rail)
    assert "no warning on a0" in check_episode(unwarned).problems[0]
    warned = replace(unwarned, warnings={"a0": ["lost the connection to rank 1 (host a1) over NIC ib0 (10.0.0.1"]})
    assert check_episode(warned).problems == ()


def test_what_was_told_is_passed_on_with_its_first_reporter() -> None:
    first = report_of(PeerLostError("it is lost", rank=0, peer=1, host="b0", nic="eth0"), "pp", (3, 6), 3)
    assert (first.cause, first.culprit, first.reporter, first.host) == ("PeerLostError", 6, 3, "b0")
    second = report_of(AbortedError(f"aborted by rank 0: {passed_on(first)}", rank=0), "dp", (2, 3), 2)
    third = report_of(AbortedError(f"aborted: {passed_on(second)}"), "tp", (1, 2), 1)
    for heard in (second, third):
        assert heard.error == "AbortedError"
        assert (heard.cause, heard.culprit, heard.reporter, heard.nic) == ("PeerLostError", 6, 3, "eth0")
    railed = report_of(PeerLostError("it is lost", rank=0, peer=1, host="b0", nic="ib0,ib1"), "dp", (3, 6), 3)
    assert report_of(AbortedError(passed_on(railed)), "tp", (1, 3), 1).nic == "ib0,ib1"
    assert report_of(WrongResultError("element 3"), "dp", (0, 1), 0).cause == "WrongResult"


def test_a_rank_that_waits_itself_is_asked_for_whom(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    waits = report_of(HolmesTimeoutError("rank 1 did not show up", rank=0, peer=1), "tp", (5, 4), 5)
    late = report_of(HolmesTimeoutError("rank 2 did not show up", rank=1, peer=2), "pp", (1, 3, 5, 7), 3)
    threading.Timer(0.1, first_cause, (store, waits, 5)).start()
    heard = first_cause(store, late, 3)
    assert (heard.cause, heard.culprit, heard.reporter, heard.kind) == ("TimeoutError", 4, 5, "pp")
    lost = report_of(PeerLostError("it is lost", rank=0, peer=1), "tp", (3, 6), 3)
    assert first_cause(store, lost, 3) == lost
    silent = report_of(HolmesTimeoutError("rank 1 did not show up", rank=0, peer=1), "tp", (5, 4), 1)
    assert first_cause(store, silent, 1) == silent


def test_growth_is_a_leak_and_a_level_is_not() -> None:
    flat = {"descriptors": 6, "threads": 2, "rss_bytes": 50 << 20}
    assert problems("rank 0", [flat] * 20) == []
    assert "7 descriptors, 6 at first" in problems("rank 0", [flat] * 19 + [{**flat, "descriptors": 7}])[0]
    growing = [{**flat, "rss_bytes": (50 << 20) + (episode << 18)} for episode in range(120)]
    assert "MiB resident" in problems("rank 0", growing)[0]
    assert problems("rank 0", growing[:60]) == []


def test_folder_store(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    assert not store.check(["a/b"])
    with pytest.raises(TimeoutError, match="a/b"):
        store.wait(["a/b"], 0.05)
    threading.Timer(0.1, store.set, ("a/b", b"\0value")).start()
    assert store.get("a/b") == b"\0value"
    assert not store.below("episode0").check(["a/b"])


def test_a_false_clock_moves_the_wall_clock_alone(tmp_path: Path) -> None:
    try:
        clock = FalseClock(tmp_path)
    except OSError as error:
        pytest.skip(str(error))
    code = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=clock.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def offsets_s() -> tuple[float, float]:
        process.stdin.write("\n")
        process.stdin.flush()
        wall_s, monotonic_s = map(float, process.stdout.readline().split())
        return wall_s - time.time(), monotonic_s - time.monotonic()

    try:
        assert max(map(abs, offsets_s())) < 5
        clock.set(-86400)
        wall_s, monotonic_s = offsets_s()
        assert abs(wall_s + 86400) < 5
        assert abs(monotonic_s) < 5
    finally:
        process.stdin.close()
        process.wait(10)


def test_names_and_names_left_out() -> None:
    known = ("stop", "kill", "memory")
    assert names_of("all", known, "fault") == ("kill", "memory", "stop")
    assert names_of("stop, kill,stop", known, "fault") == ("stop", "kill")
    assert names_of("all,-memory", known, "fault") == ("kill", "stop")
    for text, says in (
        ("kil", "no fault kil; there are kill, memory, stop"),
        ("all,-kil", "no fault -kil"),
        ("kill,-kill", "leaves no fault"),
        ("-kill", "leaves no fault"),
        (",", "leaves no fault"),
    ):
        with pytest.raises(UsageError, match=says):
            names_of(text, known, "fault")


def test_a_record_that_the_store_rewrites_is_named_with_its_field(tmp_path: Path) -> None:
    """Every field of it, as `rewritten-record` does; nothing else that goes through the store is touched."""
    said = set()
    for field in range(FIELDS):
        store = FolderStore(tmp_path / str(field))

        def body(rank: int, store: Any = store, field: int = field) -> str:
            says = "what rank 1 wrote into the store was changed there"
            changed = tampered(store, {"rewritten": field} if rank == 1 else {})
            with changed as seen, pytest.raises(ProtocolError, match=says) as caught:
                holmes_comm.init(seen, rank, 2, transport="tcp", name="rewritten", connect_timeout_s=10.0)
            return re.search(r"the field '([^']+)'", str(caught.value))[1]  # type: ignore[index]

        of_ranks = set(run_threads(2, body))
        assert len(of_ranks) == 1
        said |= of_ranks
    assert len(said) == FIELDS
    assert {"host", "tls", "rail 0 address"} < said


def test_settings_that_are_not_possible() -> None:
    with pytest.raises(ValueError, match="no fault is chosen"):
        FaultSettings(())
    with pytest.raises(ValueError, match="mixed"):
        FaultSettings(("kill",), mixed=2)
    assert FaultSettings(("kill", "stop"), seed=4).order() == FaultSettings(("stop", "kill"), seed=4).order()


def _one_episode(out: Path, fault: str, seed: int, episode: int) -> tuple[str, dict[str, Any]]:
    """Runs it, as it must be; what it said on standard error and saved."""
    command = [sys.executable, "-m", "holmes", "stress", "--testbed", "--faults", fault, "--seed", str(seed)]
    command += ["--episode", str(episode), "--save", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())["holmes"]
    assert (found["episodes"], found["problems"], found["leaks"]) == (1, {}, [])
    return done.stderr, found


@needs_namespaces
def test_a_rewritten_record_is_reported_by_name(tmp_path: Path) -> None:
    said, _ = _one_episode(tmp_path / "out", "rewritten-record", seed=5, episode=0)
    assert "episode 0 ok: the store changes field" in said


@needs_namespaces
def test_a_killed_rank_is_reported_by_name_and_its_episode_comes_again(tmp_path: Path) -> None:
    said, found = _one_episode(tmp_path / "out", "kill", seed=11, episode=3)
    assert "episode 3 ok: rank" in said
    kill = found["faults"]["kill"]
    assert (kill["right"], kill["reported"], kill["reports"]) == (1, 1, 7)
    assert found["operations_checked"] > 0
    assert "| kill: " in (tmp_path / "out.md").read_text()


@needs_namespaces
def test_sigterm_leaves_the_table_of_the_episodes_till_then(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holmes", "stress", "--testbed", "--faults", "kill", "--seed", "11"]
    command += ["--seconds", "600", "--save", str(tmp_path / "out")]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    said = ""
    while "episode 0 ok" not in said:
        assert run.poll() is None, said
        said += run.stderr.readline()
    run.send_signal(signal.SIGTERM)
    table, more = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM, more
    assert "Traceback" not in more, more
    assert "| kill: " in table
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["interrupted"]
    assert found["holmes"]["episodes"] >= 1
    assert found["holmes"]["leaks"] == []


def test_faults_need_the_testbed() -> None:
    command = [sys.executable, "-m", "holmes", "stress", "--faults", "kill"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "need --testbed" in done.stderr
