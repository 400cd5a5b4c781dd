"""One process's flight record, as its communicators wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holmes_comm.errors import UsageError
from holmes_comm.process_metrics import Metrics
from holmes_comm.recorder import short_name

__all__ = ["KIND", "Failure", "Link", "LinkSample", "Operation", "ProcessRecord", "Progress", "RankIdentity", "View"]

KIND = "holmes-flight-record"
_VERSION = 1
_DESTROYED = "it was destroyed"  # how the engine says that a communicator ended in order


@dataclass(frozen=True)
class Progress:
    """What has moved between a rank and `peer` (group rank) in an operation that is not finished, in bytes.

    `moving`: the numbers were others a little earlier.
    """

    peer: int
    heard: bool
    received_bytes: int
    to_receive_bytes: int
    sent_bytes: int
    to_send_bytes: int
    moving: bool = False


@dataclass(frozen=True)
class Operation:
    """An operation of one rank. `peers`: those with whom something is missing; None where nobody could tell."""

    op: str
    is_collective: bool
    sequence: int
    dtype: str
    count: int
    bytes: int
    reduction: str | None
    root: int | None
    peer: int | None
    tag: int
    state: str
    queued_s: float  # wall clock, as the following
    started_s: float | None = None
    finished_s: float | None = None
    is_awaited: bool = False
    peers: tuple[Progress, ...] | None = None

    @property
    def title(self) -> str:
        """As in errors: "all_reduce #118"."""
        return f"{self.op} #{self.sequence}"

    @property
    def details(self) -> str:
        """What ranks must agree on: "float32, 1000 elements, sum"."""
        parts = [self.dtype, f"{self.count} elements"]
        if self.reduction:
            parts.append(self.reduction)
        if self.root is not None:
            parts.append(f"root {self.root}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Failure:
    """What ended a communicator. `peer` is a group rank."""

    error: str
    message: str
    peer: int | None
    host: str
    nic: str


@dataclass(frozen=True)
class RankIdentity:
    """A rank of a communicator, as it introduced itself. `nic`: of the process that tells, towards it."""

    host: str
    nic: str
    pid: int
    job_rank: int | None


@dataclass(frozen=True)
class LinkSample:
    """A link at one moment of the wall clock, as one process uses it.

    Attributes:
        sent_bytes: until then, by the system; what was sent again too.
        round_trip_s: the longest of connections with something under way; 0: there are none.
        stalled: connections.
    """

    at_s: float
    sent_bytes: int
    round_trip_s: float
    stalled: int


@dataclass(frozen=True)
class Link:
    """What a process sent over a NIC from its cluster to another one (hosts, where none are named), by time."""

    nic: str
    here: str
    there: str
    samples: tuple[LinkSample, ...]


@dataclass(frozen=True)
class View:
    """One communicator as one of its ranks sees it.

    Attributes:
        entered: collectives that this rank has called.
        failure: what ended it; None while it is alive and where it ended in order.
        is_closed: ended in order.
        pending: what is not finished, collectives in their order.
        recent: the last operations, oldest first.
        sent_messages: by group rank, messages given to the system in whole; empty where nobody could tell.
        arrived_messages: by group rank, messages that came in whole.
        taken_s: when that was so, on the wall clock.
    """

    id: str
    name: str
    rank: int
    size: int
    entered: int
    failure: Failure | None
    is_closed: bool
    ranks: tuple[RankIdentity, ...]
    pending: tuple[Operation, ...]
    recent: tuple[Operation, ...]
    sent_messages: tuple[int, ...]
    arrived_messages: tuple[int, ...]
    taken_s: float

    @property
    def front(self) -> Operation | None:
        """The collective that runs here."""
        return next((operation for operation in self.pending if operation.is_collective), None)


@dataclass(frozen=True)
class ProcessRecord:
    """All communicators of one process. `stack`: of its main thread, innermost first; empty where unknown.

    `metrics`: what they have moved and done; None in records of before there were any. `to_wall_s`: the wall clock
    less the monotonic one. `links`: those between clusters; none in records of before they were told.
    """

    host: str
    pid: int
    job_rank: int | None
    is_testbed: bool
    reason: str
    taken_s: float
    views: tuple[View, ...]
    stack: tuple[str, ...] = field(default=())
    metrics: Metrics | None = None
    to_wall_s: float = 0.0
    links: tuple[Link, ...] = ()

    @classmethod
    def from_dict(cls, data: object) -> ProcessRecord:
        """Reads what the engine wrote. Raises ValueError where it is no flight record of this version."""
        if not isinstance(data, Mapping):
            raise UsageError(f"expected an object of kind {KIND!r}, got a {type(data).__name__}; name flight records")
        if data.get("kind") != KIND or data.get("version") != _VERSION:
            raise UsageError(
                f"expected kind {KIND!r} of version {_VERSION}, got {data.get('kind')!r} of version "
                f"{data.get('version')!r}; use the holmes of the job's release"
            )
        to_wall_s = float(data["wall_s"]) - float(data["monotonic_s"])
        main = next((stack for stack in data["stacks"] if stack["is_main"]), None)
        return cls(
            data["host"],
            data["pid"],
            data["job_rank"],
            data["testbed"],
            data["reason"],
            data["wall_s"],
            tuple(_view(entry, to_wall_s, data["wall_s"]) for entry in data["communicators"]),
            tuple(main["frames"]) if main else (),
            Metrics.from_dict(data["metrics"]) if "metrics" in data else None,
            to_wall_s,
            tuple(_link(entry, to_wall_s) for entry in data.get("links", ())),
        )


def _link(data: Mapping[str, Any], to_wall_s: float) -> Link:
    rows = (dict(zip(data["columns"], row, strict=True)) for row in data["samples"])
    samples = (LinkSample(**{**row, "at_s": row["at_s"] + to_wall_s}) for row in rows)
    return Link(data["nic"], data["from"], data["to"], tuple(samples))


def _view(data: Mapping[str, Any], to_wall_s: float, taken_s: float) -> View:
    failure, state = data["failure"], data["state"]
    is_closed = failure is not None and failure["message"] == _DESTROYED
    recent = tuple(_operation(entry, to_wall_s, entry["state"]) for entry in data["operations"])
    if state is None:  # the driver did not answer: what the ring knows
        pending = tuple(operation for operation in recent if operation.state in ("queued", "running"))
    else:
        taken_s = state["taken_s"] + to_wall_s
        pending = tuple(
            _operation(entry, to_wall_s, "running" if entry["running"] else "queued") for entry in state["pending"]
        )
    return View(
        id=data["id"],
        name=short_name(data["name"]),
        rank=data["rank"],
        size=data["size"],
        entered=data["entered"],
        failure=None if failure is None or is_closed else Failure(**{key: failure[key] for key in _FAILURE_FIELDS}),
        is_closed=is_closed,
        ranks=tuple(RankIdentity(**entry) for entry in data["ranks"]),
        pending=() if is_closed else pending,
        recent=recent,
        sent_messages=tuple(peer["sent"] for peer in state["messages"]) if state else (),
        arrived_messages=tuple(peer["arrived"] for peer in state["messages"]) if state else (),
        taken_s=taken_s,
    )


_FAILURE_FIELDS = ("error", "message", "peer", "host", "nic")


def _operation(data: Mapping[str, Any], to_wall_s: float, state: str) -> Operation:
    started, finished = data.get("started_s"), data.get("finished_s")
    peers = data.get("peers")
    return Operation(
        op=data["op"],
        is_collective=data["collective"],
        sequence=data["sequence"],
        dtype=data["dtype"],
        count=data["count"],
        bytes=data["bytes"],
        reduction=data["reduction"],
        root=data["root"],
        peer=data["peer"],
        tag=data["tag"],
        state=state,
        queued_s=data["queued_s"] + to_wall_s,
        started_s=None if started is None else started + to_wall_s,
        finished_s=None if finished is None else finished + to_wall_s,
        is_awaited=bool(data.get("awaited")),
        peers=None if peers is None else tuple(Progress(**entry) for entry in peers),
    )
