"""From errors to reports: whom an error names, and how a rank passes on what it knows to those it aborts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from holmes.lab.stress.faults.messages import GroupReport
from holmes.lab.stress.result import WrongResultError
from holmes.lab.stress.run import GroupRun
from holmes_comm import AbortedError, HolmesError, JobError, NicError, UnreachableError

ALARM = "alarm"
_TOLD = (
    "caused by {cause} about rank {culprit} (host {host}) on NIC {nic}, seen by rank {reporter} in {kind}: {message}"
)
_TOLD_RE = re.compile(
    r"caused by (?P<cause>\w+) about rank (?P<culprit>\d+|None) \(host (?P<host>[^)]*)\) on NIC (?P<nic>.*?), "
    r"seen by rank (?P<reporter>\d+) in"
)


_POLL_S = 0.005
#: Of two ranks, one waits for the other and that one for a third: how much later it may give up. It may have begun to
#: wait seconds later on a busy machine, and waits 1.5 s more where its group's rank 0 is lost and cannot say how the
#: set-up ended.
_SAME_TIME_S = 6.0


class Alarm(BaseException):
    """Another rank's set-up failed, as it says in the store. No Exception: a store's Exceptions are asked again."""


class AlarmedStore:
    """A store in which every wait ends with Alarm once a rank has raised the job's alarm.

    But for the last words of a set-up: who stood by then is waited for, and takes its part of the checked.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.set = store.set

    def get(self, key: str) -> bytes:
        """As the store's."""
        self.wait([key])
        return bytes(self._store.get(key))

    def check(self, keys: Iterable[str]) -> bool:
        """As the store's."""
        keys = list(keys)
        is_last_word = any(key.endswith("/decision") or "/ok/" in key for key in keys)
        if not is_last_word and not self._store.check(keys) and self._store.check([ALARM]):
            raise Alarm(self._store.get(ALARM).decode())
        return bool(self._store.check(keys))

    def wait(self, keys: Iterable[str], timeout: timedelta | float = 60.0) -> None:
        """As the store's."""
        limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        keys, end_s = list(keys), time.monotonic() + limit_s
        while not self.check(keys):
            if time.monotonic() >= end_s:
                raise TimeoutError(f"timeout: after {limit_s:g} s not all of {keys} are set")
            time.sleep(_POLL_S)


def first_cause(store: Any, failed: GroupReport, rank: int) -> GroupReport:
    """Where the rank that `failed` waited for waits itself, in a group that `rank` is not in: what that one says."""
    store.set(f"failed/{rank}", passed_on(failed))
    end_s = time.monotonic() + _SAME_TIME_S
    while failed.cause == "TimeoutError" and failed.culprit not in (None, rank) and time.monotonic() < end_s:
        if store.check([f"failed/{failed.culprit}"]):
            told = store.get(f"failed/{failed.culprit}").decode()
            return report_of(Alarm(told), failed.kind, failed.ranks, rank, reported_s=failed.reported_s)
        time.sleep(_POLL_S)
    return failed


def report_of_run(run: GroupRun, rank: int) -> GroupReport:
    """What a group's loop came to on `rank`."""
    loop, hangs = run.loop, run.thread.is_alive()
    facts: dict[str, Any] = {
        "operations": loop.operations,
        "checked_bytes": loop.checked_bytes,
        "round": loop.round,
        "reported_s": time.monotonic() if hangs else run.end_s,
    }
    if run.failure is not None:
        return report_of(run.failure, run.group.kind, run.group.ranks, rank, **facts)
    name = "Hang" if hangs else ""
    return GroupReport(kind=run.group.kind, ranks=run.group.ranks, reporter=rank, error=name, cause=name, **facts)


def report_of(error: BaseException, kind: str, ranks: tuple[int, ...], rank: int, **facts: Any) -> GroupReport:
    """What an error says, in the job's ranks; what another rank told, as that one saw it."""
    name = "WrongResult" if isinstance(error, WrongResultError) else type(error).__name__
    told = _TOLD_RE.search(str(error)) if isinstance(error, (AbortedError, Alarm, JobError)) else None
    if told is not None:
        place: dict[str, Any] = {key: told[key] for key in ("cause", "host", "nic")}
        culprit, reporter = (None if told["culprit"] == "None" else int(told["culprit"])), int(told["reporter"])
    else:
        culprit, reporter, place = None, rank, {"cause": name}
        if isinstance(error, MemoryError):  # of this process alone
            culprit = rank
        if isinstance(error, HolmesError):
            place |= {"host": error.host, "nic": error.nic}
            says_of_itself = error.peer is None and isinstance(error, (JobError, NicError, UnreachableError))
            culprit = _at(ranks, error.rank if says_of_itself else error.peer)
            seen_by = _at(ranks, error.rank)
            reporter = rank if seen_by is None else seen_by
    facts = {"operations": 0, "checked_bytes": 0, "reported_s": time.monotonic(), **facts}
    return GroupReport(
        kind=kind, ranks=ranks, error=name, culprit=culprit, reporter=reporter, message=str(error), **place, **facts
    )


def _at(ranks: tuple[int, ...], place: int | None) -> int | None:
    return ranks[place] if place is not None and 0 <= place < len(ranks) else None


def passed_on(report: GroupReport) -> str:
    """The report for those that hear of it by an abort or alarm."""
    if _TOLD_RE.search(report.message) is not None:
        return report.message[report.message.index("caused by ") :]
    fields = ("cause", "culprit", "host", "nic", "reporter", "kind", "message")
    return _TOLD.format(**{name: getattr(report, name) for name in fields})
