"""What communicators that failed say of the reason: operations that did not match, processes that are gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from holmes.tools.debug.cause import Cause
from holmes.tools.debug.members import Communicator, Member
from holmes.tools.debug.record import Operation, View
from holmes.tools.debug.text import name_of, names_of, place_of

__all__ = ["is_part", "mismatch_of", "other_failure", "what_failed"]

_EQUAL_COUNTS = ("all_reduce", "broadcast", "reduce")  # of the others, ranks may have different counts
_REPORTED = "[reported by"


def is_part(communicator: Communicator) -> bool:
    """Whether another communicator is made of it, over clusters or for a GPU's memory: then that one tells."""
    name = communicator.name
    return "/cluster" in name or "/cross" in name or name.endswith("/control")


def what_failed(communicator: Communicator) -> Iterator[Cause]:
    """Mismatches and lost processes of one communicator."""
    failures = [(view, view.failure) for view in communicator.views.values() if view.failure]
    if is_part(communicator):
        return
    if any(failure.error == "MismatchError" for _, failure in failures):
        yield mismatch_of(communicator) or _told(communicator, "mismatch")
    elif any(failure.error == "PeerLostError" for _, failure in failures):
        yield _lost(communicator)


def other_failure(communicator: Communicator) -> Cause | None:
    """A failure of which nothing else is known than what its error says."""
    if is_part(communicator) or not any(view.failure for view in communicator.views.values()):
        return None
    return _told(communicator, "failure")


def _signature(operation: Operation) -> tuple[object, ...]:
    count = operation.count if operation.op in _EQUAL_COUNTS else None
    return operation.op, operation.dtype, operation.reduction, operation.root, count


def mismatch_of(communicator: Communicator) -> Cause | None:
    """The first collective in which the ranks' calls differ; None: in none of those that are recorded."""
    calls: dict[int, dict[int, Operation]] = {}
    for rank, view in communicator.views.items():
        for operation in view.recent:
            if operation.is_collective:
                calls.setdefault(operation.sequence, {})[rank] = operation
    for sequence in sorted(calls):
        by_rank = calls[sequence]
        counts = Counter(_signature(operation) for operation in by_rank.values())
        if len(counts) < 2:
            continue
        (usual, votes), (_, second) = counts.most_common(2)
        odd = [rank for rank, operation in by_rank.items() if _signature(operation) != usual]
        rest = [rank for rank in by_rank if rank not in odd]
        culprits = odd if votes > second else [*odd, *rest]
        members = communicator.members
        told = "; ".join(
            f"{place_of(members[rank], communicator.nic(rank, rest[0]))} called {by_rank[rank].title} "
            f"({by_rank[rank].details})"
            for rank in odd
        )
        return Cause(
            kind="mismatch",
            sentence=f"{told} of group {communicator.name}, where {names_of(members[rank] for rank in rest)} called "
            f"{by_rank[rest[0]].title} ({by_rank[rest[0]].details}); all ranks must call the same operations in the "
            "same order",
            culprits=tuple(sorted(members[rank].number for rank in culprits)),
            operation=by_rank[odd[0]].title,
            group=communicator.name,
            nics=_nics(communicator, odd[0], rest[0]),
            waiting=tuple(sorted(members[rank].number for rank in rest)),
        )
    return None


def _first_reporter(communicator: Communicator) -> View:
    """One that saw it itself; the others were told."""
    failed = [view for view in communicator.views.values() if view.failure]
    return next((view for view in failed if view.failure and _REPORTED not in view.failure.message), failed[0])


def _lost(communicator: Communicator) -> Cause:
    reporters = [view for view in communicator.views.values() if view.failure and view.failure.error == "PeerLostError"]
    reporter = next(
        (view for view in reporters if view.failure and _REPORTED not in view.failure.message), reporters[0]
    )
    failure = reporter.failure
    assert failure is not None
    if failure.peer is None:
        return _told(communicator, "lost")
    culprit = communicator.members[failure.peer]
    operation = reporter.front or next(iter(reporter.pending), None)
    if "destroyed its communicator" in failure.message:
        state = "destroyed its communicator"
    elif culprit.silence:
        state = f"(process {culprit.pid}, which is {culprit.silence}) is not connected any more"
    elif culprit.record is None:
        state = f"is gone: its process {culprit.pid} has ended"
    else:
        state = f"(process {culprit.pid}) is not connected any more"
    others = [communicator.members[view.rank] for view in reporters if view.rank != failure.peer]
    during = f" in {operation.title}" if operation else ""
    return Cause(
        kind="lost",
        sentence=f"{place_of(culprit, communicator.nic(failure.peer, reporter.rank))} {state}; "
        f"{names_of(others)} lost it{during} of group {communicator.name}",
        culprits=(culprit.number,),
        operation=operation.title if operation else "",
        group=communicator.name,
        nics=(failure.nic,) if failure.nic else (),
        waiting=tuple(sorted({member.number for member in others})),
    )


def _told(communicator: Communicator, kind: str) -> Cause:
    reporter = _first_reporter(communicator)
    failure = reporter.failure
    assert failure is not None
    culprits: tuple[Member, ...] = ()
    if failure.peer is not None and failure.peer < len(communicator.members):
        culprits = (communicator.members[failure.peer],)
    operation = next((o for o in reversed(reporter.recent) if o.state == "failed"), None)
    return Cause(
        kind=kind,
        sentence=f"{name_of(communicator.members[reporter.rank])} of group {communicator.name}: {failure.error}: "
        f"{failure.message}",
        culprits=tuple(member.number for member in culprits),
        operation=operation.title if operation else "",
        group=communicator.name,
        nics=(failure.nic,) if failure.nic else (),
        waiting=(communicator.members[reporter.rank].number,),
    )


def _nics(communicator: Communicator, one: int, other: int) -> tuple[str, ...]:
    nics = (communicator.nic(one, other), communicator.nic(other, one))
    return tuple(dict.fromkeys(nic for nic in nics if nic))
