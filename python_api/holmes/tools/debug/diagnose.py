"""Merges the records of a job into findings: causes first, what follows from them after."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from holmes.tools.debug.cause import Cause
from holmes.tools.debug.failures import is_part, mismatch_of, other_failure, what_failed
from holmes.tools.debug.members import Communicator, JobRecord, Member, SetUp, jobs_of
from holmes.tools.debug.record import ProcessRecord
from holmes.tools.debug.sources import Silent
from holmes.tools.debug.text import doing, in_operation, name_of, names_of, place_of, seconds
from holmes.tools.debug.waits import ABSENT, LINK, Wait, waits_of
from holmes.words import short

__all__ = ["diagnose", "diagnose_job"]

_SHORTEST_S = 1.0  # of waits that no thread is blocked by


def diagnose(records: Iterable[ProcessRecord], silent: Iterable[Silent] = ()) -> list[Cause]:
    """What is wrong in the jobs that these processes belong to; empty: nobody waits and nothing has failed."""
    return [finding for job in jobs_of(records, silent) for finding in diagnose_job(job)]


def diagnose_job(job: JobRecord) -> list[Cause]:
    """What is wrong in one job."""
    job = JobRecord(job.members, [one for one in job.communicators if not job.is_history(one)], job.set_ups)
    failed = [finding for communicator in job.communicators for finding in what_failed(communicator)]
    explained = {finding.group for finding in failed}
    waits = [wait for wait in _relevant(waits_of(job)) if wait.communicator.name not in explained]
    # Where operations end on their own (local_completion), ranks that disagree may only wait for each other.
    waiting = {wait.communicator.id: wait.communicator for wait in waits if not is_part(wait.communicator)}
    failed += [finding for communicator in waiting.values() if (finding := mismatch_of(communicator)) is not None]
    explained = {finding.group for finding in failed}
    hung = _hung(job, [wait for wait in waits if wait.communicator.name not in explained])
    explained |= {finding.group for finding in hung}
    rest = [
        finding
        for communicator in job.communicators
        if communicator.name not in explained and (finding := other_failure(communicator)) is not None
    ]
    findings = [*map(_incomplete, job.set_ups), *failed, *hung, *([] if failed or hung else rest)]
    return sorted(findings, key=lambda finding: not finding.is_cause)


def _incomplete(set_up: SetUp) -> Cause:
    missing, here = set_up.missing, sorted(set_up.members)
    hosts = ", ".join(sorted({member.host for member in set_up.members.values()}))
    return Cause(
        kind=ABSENT,
        sentence=f"of {set_up.size} ranks of group {set_up.name}, {short(missing)} did not come to its set-up, where "
        f"{short(here)} wait (host {hosts}); look at the output of those that are missing, and whether every rank "
        "makes this group and reaches the store",
        culprits=tuple(missing),
        operation="set-up",
        group=set_up.name,
        waiting=tuple(sorted(set_up.members)),
    )


def _relevant(waits: list[Wait]) -> list[Wait]:
    """Those that block a thread, or did so when their communicator failed; else all that last."""
    blocking = [w for w in waits if w.is_awaited or w.communicator.views[w.waiting].failure is not None]
    found = blocking or [wait for wait in waits if wait.waited_s >= _SHORTEST_S]
    told = {wait.communicator.name for wait in found if not is_part(wait.communicator)}
    # The parts of a communicator over clusters wait for whom that one waits for.
    return [w for w in found if not (is_part(w.communicator) and any(w.communicator.name.startswith(n) for n in told))]


def _hung(job: JobRecord, waits: list[Wait]) -> list[Cause]:
    links = [wait for wait in waits if wait.kind == LINK]
    absences = [wait for wait in waits if wait.kind == ABSENT]
    cycle = _cycle(absences)
    findings = [_link(list(group)) for _, group in _grouped(links, _pair)]
    in_cycle = {id(wait.waiting_member) for wait in cycle}
    if cycle:
        findings.append(_deadlock(cycle))
    for _, group in _grouped(absences, _place):
        together = list(group)
        # What the deadlock's sentence has said.
        if all(id(w.waiting_member) in in_cycle and id(w.missing_member) in in_cycle for w in together):
            continue
        findings.append(_absence(together, waits, job))
    return findings


def _grouped(waits: list[Wait], key: object) -> Iterable[tuple[object, Iterable[Wait]]]:
    assert callable(key)
    return groupby(sorted(waits, key=key), key=key)


def _pair(wait: Wait) -> tuple[object, ...]:
    ends = sorted((wait.waiting_member.number, wait.missing_member.number))
    return (wait.communicator.id, *ends)


def _place(wait: Wait) -> tuple[object, ...]:
    """Waits that one sentence tells of: for the same rank in the same operation."""
    if wait.operation.is_collective:
        return wait.communicator.id, wait.operation.sequence, wait.operation.op, wait.missing, -1
    any_rank = wait.operation.peer is None
    return (
        wait.communicator.id,
        wait.operation.sequence,
        wait.operation.op,
        -1 if any_rank else wait.missing,
        wait.waiting,
    )


def _absence(together: list[Wait], waits: list[Wait], job: JobRecord) -> Cause:
    wait = max(together, key=lambda one: one.waited_s)
    communicator, operation = wait.communicator, wait.operation
    missing = list({one.missing: one.missing_member for one in together}.values())
    waiting = list({one.waiting: one.waiting_member for one in together}.values())
    nic = communicator.nic(wait.missing, wait.waiting)
    place = in_operation(operation, communicator)
    who = names_of(waiting)
    wait_verb = "wait" if len(waiting) > 1 else "waits"
    if operation.is_collective:
        told = f"{place_of(wait.missing_member, nic)} has not entered {place}; {who} {wait_verb} in it"
    elif operation.peer is None:
        told = f"no rank has sent what {who} waits for in {place}; it waits"
    else:
        missing_call = "send" if operation.op == "recv" else "recv"
        told = f"{place_of(wait.missing_member, nic)} has not called the {missing_call} for {place}; {who} {wait_verb}"
    own = [one for one in waits if one.waiting_member is wait.missing_member]
    activity = (
        doing(wait.missing_member, own, job, communicator)
        if operation.peer is not None or operation.is_collective
        else ""
    )
    return Cause(
        kind=ABSENT,
        sentence=f"{told} for {seconds(wait.waited_s)}" + (f"; {activity}" if activity else ""),
        culprits=tuple(sorted(member.number for member in missing)),
        operation=operation.title,
        group=communicator.name,
        nics=tuple(dict.fromkeys(n for n in (nic, communicator.nic(wait.waiting, wait.missing)) if n)),
        waiting=tuple(sorted(member.number for member in waiting)),
        is_cause=not own,
    )


def _link(together: list[Wait]) -> Cause:
    wait = max(together, key=lambda one: one.missing_bytes)
    communicator = wait.communicator
    sender, receiver = wait.missing_member, wait.waiting_member
    if wait.operation.op == "send":
        sender, receiver = receiver, sender
        ends = (wait.waiting, wait.missing)
    else:
        ends = (wait.missing, wait.waiting)
    nics = (communicator.nic(*ends), communicator.nic(ends[1], ends[0]))
    what = f"{wait.missing_bytes} bytes that" if wait.missing_bytes else "what"
    told = (
        f"have not arrived at {name_of(receiver)}" if wait.missing_bytes else f"has not arrived at {name_of(receiver)}"
    )
    stopped = next((member for member in (sender, receiver) if member.silence in ("stopped", "busy")), None)
    if stopped is not None:
        state = "is stopped (SIGSTOP or a debugger)" if stopped.silence == "stopped" else "does not answer"
        sentence = (
            f"{place_of(stopped)}: its process {stopped.pid} {state} in {in_operation(wait.operation, communicator)}; "
            f"{names_of(w.waiting_member for w in together)} wait for it for {seconds(wait.waited_s)}"
        )
    else:
        sentence = (
            f"nothing comes through between {place_of(sender, nics[0])} and {place_of(receiver, nics[1])}: {what} "
            f"{name_of(sender)} sent for {in_operation(wait.operation, communicator)} {told}, "
            f"which has waited for {seconds(wait.waited_s)}; is the link cut, or a firewall between? (holmes doctor)"
        )
    culprits = [stopped] if stopped is not None else [sender, receiver]
    return Cause(
        kind=ABSENT if stopped is not None else LINK,
        sentence=sentence,
        culprits=tuple(sorted(member.number for member in culprits)),
        operation=wait.operation.title,
        group=communicator.name,
        nics=tuple(dict.fromkeys(nic for nic in nics if nic)),
        waiting=tuple(sorted({one.waiting_member.number for one in together})),
    )


def _cycle(absences: list[Wait]) -> list[Wait]:
    """Waits that lead in a circle, as few as possible from the first rank that has one; empty: there is none."""
    by_member: dict[int, list[Wait]] = {}
    for wait in absences:
        by_member.setdefault(id(wait.waiting_member), []).append(wait)
    for start in by_member:
        reached: dict[int, Wait] = {}  # by member: the wait that led to it
        queue = [start]
        for member in queue:
            for wait in by_member.get(member, []):
                target = id(wait.missing_member)
                if target in reached:
                    continue
                reached[target] = wait
                queue.append(target)
        if start in reached:
            cycle = [reached[start]]
            while id(cycle[0].waiting_member) != start:
                cycle.insert(0, reached[id(cycle[0].waiting_member)])
            return cycle
    return []


def _deadlock(cycle: list[Wait]) -> Cause:
    steps = [
        f"waits in {in_operation(wait.operation, wait.communicator)} for {name_of(wait.missing_member)}"
        for wait in cycle
    ]
    first = cycle[0]
    start: Member = first.waiting_member
    communicator: Communicator = first.communicator
    nics = [wait.communicator.nic(wait.waiting, wait.missing) for wait in cycle]
    return Cause(
        kind="deadlock",
        sentence=f"deadlock: {place_of(start, nics[0])} {', which '.join(steps)}, for "
        f"{seconds(max(wait.waited_s for wait in cycle))}; they must call these operations in one order",
        culprits=tuple(sorted({wait.waiting_member.number for wait in cycle})),
        operation=first.operation.title,
        group=communicator.name,
        nics=tuple(dict.fromkeys(nic for nic in nics if nic)),
        waiting=tuple(sorted({wait.waiting_member.number for wait in cycle})),
    )
