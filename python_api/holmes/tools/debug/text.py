"""How members, ranks and times are called in sentences."""

from __future__ import annotations

from collections.abc import Iterable

from holmes.tools.debug.members import Communicator, JobRecord, Member
from holmes.tools.debug.record import Operation
from holmes.tools.debug.waits import Wait

__all__ = ["doing", "in_operation", "name_of", "names_of", "place_of", "seconds"]

_LIBRARY = ("site-packages/", "/lib/python", "holmes_comm/", "<frozen")


def name_of(member: Member) -> str:
    """As in "rank 2"."""
    return f"rank {member.number}"


def names_of(members: Iterable[Member]) -> str:
    """As in "rank 3" and "ranks 0, 1, 3"; many are cut short."""
    numbers = sorted({member.number for member in members})
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(str(number) for number in numbers[:16])
    return f"ranks {shown}" + (f" and {len(numbers) - 16} others" if len(numbers) > 16 else "")


def place_of(member: Member, nic: str = "") -> str:
    """As in "rank 2 (host b0, NIC eth0)"."""
    return f"{name_of(member)} (host {member.host or 'unknown'}" + (f", NIC {nic})" if nic else ")")


def in_operation(operation: Operation, communicator: Communicator) -> str:
    """As in "all_reduce #118 of group dp0" and "recv #40 from rank 1 of group pp"."""
    if operation.is_collective:
        return f"{operation.title} of group {communicator.name}"
    preposition = "to" if operation.op == "send" else "from"
    peer = "any rank" if operation.peer is None else name_of(communicator.members[operation.peer])
    tag = f" with tag {operation.tag}" if operation.tag else ""
    return f"{operation.title} {preposition} {peer}{tag} of group {communicator.name}"


def seconds(value: float) -> str:
    """As in "12.3 s"."""
    return f"{max(value, 0.0):.1f} s"


def doing(member: Member, waits: list[Wait], job: JobRecord, communicator: Communicator) -> str:
    """What a member does instead of coming to an operation of `communicator`; `waits`: its own."""
    if member.record is None:
        if member.silence == "stopped":
            return f"its process {member.pid} is stopped (SIGSTOP or a debugger)"
        if member.silence == "busy":
            return f"its process {member.pid} runs, but its watcher does not answer"
        if member.silence == "unasked":
            return f"its process {member.pid} runs, but was not asked: name it too, or no process at all"
        return f"its process {member.pid} does not answer and left no record: it has ended, or is out of reach"
    view = member.view(communicator.id)
    if view is None or view.is_closed:
        return f"{name_of(member)} has destroyed that communicator{_last(member, job)}"
    if waits:
        first = max(waits, key=lambda wait: wait.waited_s)
        return (
            f"{name_of(member)} is in {in_operation(first.operation, first.communicator)} and waits there for "
            f"{names_of(wait.missing_member for wait in waits if wait.operation is first.operation)}"
        )
    where = _where(member)
    return f"{name_of(member)} is in no operation{where}{_last(member, job)}"


def _where(member: Member) -> str:
    """Where the program itself is, not a library it called."""
    assert member.record is not None
    own = [frame for frame in member.record.stack if not any(part in frame for part in _LIBRARY)]
    frame = next(iter([*own, *member.record.stack]), None)
    return f": its program is at {frame}" if frame else ""


def _last(member: Member, job: JobRecord) -> str:
    assert member.record is not None
    finished = [
        (operation.finished_s, operation, view.id)
        for view in member.record.views
        for operation in view.recent
        if operation.finished_s is not None and operation.state == "completed"
    ]
    if not finished:
        return ""
    end_s, operation, identity = max(finished, key=lambda entry: entry[0])
    communicator = next(one for one in job.communicators if one.id == identity)
    ago = seconds(member.record.taken_s - end_s)
    return f"; its last one was {in_operation(operation, communicator)}, {ago} ago"
