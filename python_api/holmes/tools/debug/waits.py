"""Who waits for whom: the edges between the members of a job, with what is known of the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holmes.tools.debug.members import Communicator, JobRecord, Member
from holmes.tools.debug.record import Operation, Progress, View

__all__ = ["ABSENT", "LINK", "Wait", "waits_of"]

ABSENT = "absent"  # the other one has not come to the operation
LINK = "link"  # the other one has sent what does not arrive


@dataclass(frozen=True)
class Wait:
    """One rank of a communicator waits for another one in an operation. Ranks are the communicator's.

    Attributes:
        kind: ABSENT or LINK.
        is_awaited: a thread of the waiting process is blocked by it.
        waited_s: since the call.
        missing_bytes: of a LINK, bytes that were sent and have not arrived; 0: only a header.
    """

    communicator: Communicator
    operation: Operation
    waiting: int
    missing: int
    kind: str
    is_awaited: bool
    waited_s: float
    missing_bytes: int = 0

    @property
    def waiting_member(self) -> Member:
        """The process that waits."""
        return self.communicator.members[self.waiting]

    @property
    def missing_member(self) -> Member:
        """The process it waits for."""
        return self.communicator.members[self.missing]


def waits_of(job: JobRecord) -> list[Wait]:
    """All waits of a job. A communicator that failed counts as it was when it did."""
    found = []
    for communicator in job.communicators:
        found += list(_collective_waits(communicator))
        for view in communicator.views.values():
            for operation in view.pending:
                if not operation.is_collective:
                    found += list(_message_waits(communicator, view, operation))
    return found


def _collective_waits(communicator: Communicator) -> Iterator[Wait]:
    fronts = {rank: view.front for rank, view in communicator.views.items()}
    running = {rank: front for rank, front in fronts.items() if front is not None}
    if not running:
        return
    first = min(front.sequence for front in running.values())
    stuck = {rank: front for rank, front in running.items() if front.sequence == first}
    absent = [rank for rank in range(len(communicator.members)) if _is_absent(communicator, rank, first, stuck)]
    for rank, front in stuck.items():
        view = communicator.views[rank]
        is_awaited = any(operation.is_awaited for operation in view.pending if operation.is_collective)
        waited_s = view.taken_s - front.queued_s
        if absent:
            for other in absent:
                yield Wait(communicator, front, rank, other, ABSENT, is_awaited, waited_s)
            continue
        lost = {
            p.peer: (p, b) for p in front.peers or () if (b := _lost_bytes(communicator, p, rank, stuck)) is not None
        }
        # Of the others it may only not have taken yet what came: the one it has least of holds it up.
        least = min((_share(progress) for progress, _ in lost.values()), default=0.0)
        for peer, (progress, missing_bytes) in lost.items():
            if _share(progress) == least:
                yield Wait(communicator, front, rank, peer, LINK, is_awaited, waited_s, missing_bytes)


def _share(progress: Progress) -> float:
    """How much of what comes from the peer has come; less than nothing where not even its header has."""
    if not progress.heard:
        return -1.0
    return progress.received_bytes / max(progress.to_receive_bytes, 1)


def _is_absent(communicator: Communicator, rank: int, sequence: int, stuck: dict[int, Operation]) -> bool:
    view = communicator.views.get(rank)
    if view is not None:
        return view.entered <= sequence
    # Of a process without a record, the others know whether they have heard of it, and whether they still need it.
    entries = [p for other in stuck.values() for p in other.peers or () if p.peer == rank]
    if communicator.members[rank].silence == "stopped":
        return bool(entries)
    return bool(entries) and not any(progress.heard for progress in entries)


def _lost_bytes(communicator: Communicator, progress: Progress, rank: int, stuck: dict[int, Operation]) -> int | None:
    """Bytes that the peer has sent to `rank` and that have not arrived; None: the peer itself has not sent more."""
    if progress.moving:
        return None
    if progress.peer not in communicator.views:
        return progress.to_receive_bytes - progress.received_bytes  # entered, and then nothing more
    if progress.peer not in stuck:  # it is done with this operation
        left = progress.to_receive_bytes - progress.received_bytes
        return left if left > 0 or not progress.heard else None
    there = next((p for p in stuck[progress.peer].peers or () if p.peer == rank), None)
    sent = progress.to_receive_bytes if there is None else there.sent_bytes
    if there is not None and there.moving:
        return None
    on_the_way = sent - progress.received_bytes
    return max(on_the_way, 0) if on_the_way > 0 or not progress.heard else None


def _message_waits(communicator: Communicator, view: View, operation: Operation) -> Iterator[Wait]:
    waited_s = view.taken_s - operation.queued_s
    if operation.peer is None:  # a receive from any rank
        for other in range(view.size):
            if other != view.rank:
                yield Wait(communicator, operation, view.rank, other, ABSENT, operation.is_awaited, waited_s)
        return
    peer = operation.peer
    there = communicator.views.get(peer)
    if any(progress.moving for progress in operation.peers or ()):
        return
    kind, lost = ABSENT, 0
    if there is not None:
        counterpart = "send" if operation.op == "recv" else "recv"
        match = next(
            (
                o
                for o in there.pending
                if o.op == counterpart and o.peer in (view.rank, None) and o.tag == operation.tag
            ),
            None,
        )
        in_transit = _messages_in_transit(view, there) if operation.op == "recv" else 0
        if match is not None or in_transit > 0:
            kind = LINK
            lost = _message_lost_bytes(operation, match)
    yield Wait(communicator, operation, view.rank, peer, kind, operation.is_awaited, waited_s, lost)


def _messages_in_transit(receiver: View, sender: View) -> int:
    if not sender.sent_messages or not receiver.arrived_messages:
        return 0
    return sender.sent_messages[receiver.rank] - receiver.arrived_messages[sender.rank]


def _message_lost_bytes(operation: Operation, match: Operation | None) -> int:
    receive, send = (operation, match) if operation.op == "recv" else (match, operation)
    received = sum(progress.received_bytes for progress in (receive.peers or ())) if receive else 0
    sent = sum(progress.sent_bytes for progress in (send.peers or ())) if send else operation.bytes
    return max(sent - received, 0)
