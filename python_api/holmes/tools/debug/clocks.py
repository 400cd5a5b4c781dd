"""Clocks of a job's hosts, compared by what they did together: nothing is asked, so it works on files, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from holmes.tools.debug.members import Communicator, JobRecord
from holmes.tools.debug.record import Operation

__all__ = ["HostClock", "host_clocks"]

# Nobody leaves one of these before all have come, though it has no bytes.
_TOGETHER = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier", "split")


@dataclass(frozen=True)
class HostClock:
    """What a host's wall clock is ahead of the first host's, and by how much that may be wrong, in seconds.

    `error_s` is None where the two did nothing together: `ahead_s` is 0 then.
    """

    ahead_s: float
    error_s: float | None


def host_clocks(job: JobRecord) -> dict[str, HostClock]:
    """By host, against the host of the first member.

    An operation that all ranks take part in ends nowhere before it was called everywhere, and a message arrives after
    it was sent. Each says that one clock is ahead of another one's by at most, or at least, so much; the narrowest of
    these bounds count. Where they allow that two clocks agree, they do; else the middle is taken. Hosts that share no
    operation are compared by those that share one with both, the surest way first.
    """
    bounds: dict[tuple[str, str], float] = {}  # (one, other) -> the most that `other` is ahead of `one`
    for communicator in job.communicators:
        for one, other, most_s in _bounds(communicator):
            bounds[one, other] = min(most_s, bounds.get((one, other), most_s))
    hosts = list(dict.fromkeys(member.host for member in job.members))
    found = {hosts[0]: HostClock(0.0, 0.0)} if hosts else {}
    while True:
        ways = [
            (error_s + (found[one].error_s or 0.0), found[one].ahead_s + ahead_s, other)
            for (one, other), most_s in bounds.items()
            if one in found and other not in found and (other, one) in bounds
            for ahead_s, error_s in [_between(-bounds[other, one], most_s)]
        ]
        if not ways:
            return found | {host: HostClock(0.0, None) for host in hosts if host not in found}
        error_s, ahead_s, host = min(ways)
        found[host] = HostClock(ahead_s, error_s)


def _between(least_s: float, most_s: float) -> tuple[float, float]:
    """The likeliest value, and how wrong it may be."""
    error_s = abs(most_s - least_s) / 2
    return (0.0 if least_s <= 0.0 <= most_s else (least_s + most_s) / 2), error_s


def _bounds(communicator: Communicator) -> Iterator[tuple[str, str, float]]:
    """One host, another, and the most that the other's clock is ahead: an end there less a call here before it."""
    for one, other in permutations(communicator.views, 2):
        here, there = communicator.members[one].host, communicator.members[other].host
        if here == there:
            continue
        calls, ends = communicator.views[one].recent, communicator.views[other].recent
        together = {(call.op, call.sequence): call for call in calls if call.op in _TOGETHER}
        for end in ends:
            if (call := together.get((end.op, end.sequence))) is not None and end.state == "completed":
                yield here, there, (end.finished_s or 0.0) - call.queued_s
        if _is_whole(calls) and _is_whole(ends):
            sent = {key: call for key, call in _messages(calls, "send", other)}
            for key, end in _messages(ends, "recv", one):
                if key in sent and end.state == "completed":
                    yield here, there, (end.finished_s or 0.0) - sent[key].queued_s


def _is_whole(operations: Sequence[Operation]) -> bool:
    """Whether the first message is still known, so that the others can be counted."""
    return any(not operation.is_collective and operation.sequence == 0 for operation in operations)


def _messages(operations: Sequence[Operation], op: str, peer: int) -> Iterator[tuple[tuple[int, int], Operation]]:
    """Sends to `peer`, or receives from it: tag and number among those of this tag."""
    numbers: Counter[int] = Counter()
    for operation in operations:
        if operation.op == op and operation.peer == peer:
            yield (operation.tag, numbers[operation.tag]), operation
            numbers[operation.tag] += 1
