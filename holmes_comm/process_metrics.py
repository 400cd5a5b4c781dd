"""What the communicators of this process have moved, done, repeated and lost: structure, Prometheus, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holmes_comm.recorder import short_name

__all__ = ["Metrics", "NicMetrics", "OperationMetrics", "Wait", "metrics"]


@dataclass(frozen=True)
class NicMetrics:
    """What a group's connections over one NIC carried inside a cluster, or between clusters.

    Attributes:
        group: name of the communicator, or of the process group.
        nic: interface; "shm": shared memory.
        sent_bytes: payload and headers given to the system.
        received_bytes: the same, received.
        retransmitted_segments: TCP segments that the system sent again.
        resent_chunks: pieces that went out again on other rails, since this one was lost.
        connections: open ones.
        path: "inter": to ranks of other clusters, or far ones where no clusters are named; "intra": to all others.
        round_trip_s: the longest that TCP measures now, of open connections; 0: none does.
        path_changes: how often what a far path carries became another rate, by more than a third.
        busy_s: how long bytes waited to be sent or acknowledged; of several connections added up, as the following.
        receiver_limited_s: of that, while the peer did not read.
        buffer_limited_s: of that, while the send buffer was full.
        stalls: inter: how often a connection had bytes under way of which none arrived, for 0.3 s or more.
        stalled_s: how long that lasted.
    """

    group: str
    nic: str
    sent_bytes: int
    received_bytes: int
    retransmitted_segments: int
    resent_chunks: int
    connections: int
    path: str = "intra"
    round_trip_s: float = 0.0
    path_changes: int = 0
    busy_s: float = 0.0
    receiver_limited_s: float = 0.0
    buffer_limited_s: float = 0.0
    stalls: int = 0
    stalled_s: float = 0.0


@dataclass(frozen=True)
class OperationMetrics:
    """The operations of one kind in a group that have ended.

    Attributes:
        group: as above.
        op: "all_reduce", "send", ...
        completed: how many ended well.
        failed: how many did not.
        bytes: of this rank's buffers, completed ones.
        seconds: from call to end, completed ones, added up; asynchronous ones overlap.
    """

    group: str
    op: str
    completed: int
    failed: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Wait:
    """The oldest operation of a group that has not ended, `seconds` after its call. `sequence`: as in errors."""

    group: str
    op: str
    sequence: int
    seconds: float


@dataclass(frozen=True)
class Metrics:
    """Totals since the process began, also of communicators that have ended.

    Attributes:
        nics: by group, NIC and path.
        operations: by group and operation; empty with HOLMES_FLIGHT_RECORDER=0.
        failures: communicators that failed, by group and name of the error.
        communicators: those alive, by group.
        labels: of this process, on every line: job rank, where it has one, and host.
        waits: what has not ended, at most one for each group; empty with HOLMES_FLIGHT_RECORDER=0.
    """

    nics: tuple[NicMetrics, ...]
    operations: tuple[OperationMetrics, ...]
    failures: dict[tuple[str, str], int]
    communicators: dict[str, int]
    labels: dict[str, str]
    waits: tuple[Wait, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Metrics:
        """Reads what `to_dict` made, or a flight record's totals. Raises KeyError or TypeError for anything else."""

        def named(entry: Mapping[str, Any]) -> dict[str, Any]:
            return {**entry, "group": short_name(entry["group"])}

        return cls(
            nics=tuple(NicMetrics(**named(entry)) for entry in data["nics"]),
            operations=tuple(OperationMetrics(**named(entry)) for entry in data["operations"]),
            failures={(short_name(entry["group"]), entry["error"]): entry["count"] for entry in data["failures"]},
            communicators={short_name(group): count for group, count in data["communicators"].items()},
            labels=dict(data.get("labels", {})),
            waits=tuple(Wait(**named(entry)) for entry in data["waits"]),
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain dicts and lists."""
        failures = [{"group": group, "error": error, "count": n} for (group, error), n in self.failures.items()]
        return {**asdict(self), "failures": failures}

    def to_json(self) -> str:
        """As JSON, one object."""
        return json.dumps(self.to_dict())

    def to_prometheus(self) -> str:
        """In Prometheus's text format (version 0.0.4)."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        for name, kind, meaning, samples in self._families():
            yield f"# HELP {name} {meaning}"
            yield f"# TYPE {name} {kind}"
            for labels, value in samples:
                text = ",".join(f'{key}="{_escaped(label)}"' for key, label in {**labels, **self.labels}.items())
                yield f"{name}{{{text}}} {value}"

    def _families(self) -> Iterator[tuple[str, str, str, list[tuple[dict[str, str], float]]]]:
        def of_nics(field: str) -> list[tuple[dict[str, str], float]]:
            return [({"group": nic.group, "nic": nic.nic, "path": nic.path}, getattr(nic, field)) for nic in self.nics]

        def between(field: str) -> list[tuple[dict[str, str], float]]:
            return [sample for sample in of_nics(field) if sample[0]["path"] == "inter"]

        def of_operations(field: str) -> list[tuple[dict[str, str], float]]:
            return [({"group": op.group, "op": op.op}, getattr(op, field)) for op in self.operations]

        yield "holmes_sent_bytes_total", "counter", "Bytes sent over a NIC for a group.", of_nics("sent_bytes")
        yield "holmes_received_bytes_total", "counter", "Bytes received.", of_nics("received_bytes")
        again = "TCP segments the system sent again."
        yield "holmes_retransmitted_segments_total", "counter", again, of_nics("retransmitted_segments")
        resent = "Pieces sent again on other rails after a rail was lost."
        yield "holmes_resent_chunks_total", "counter", resent, of_nics("resent_chunks")
        yield "holmes_connections", "gauge", "Open connections.", of_nics("connections")
        round_trips = [sample for sample in of_nics("round_trip_s") if sample[1] > 0]
        yield "holmes_round_trip_seconds", "gauge", "Longest that TCP measures now.", round_trips
        changes = "Times that a far path's rate became another."
        yield "holmes_path_changes_total", "counter", changes, of_nics("path_changes")
        busy = "Seconds that bytes waited to be sent or acknowledged, of all connections."
        yield "holmes_busy_seconds_total", "counter", busy, of_nics("busy_s")
        unread = "Of these, while the peer did not read."
        yield "holmes_receiver_limited_seconds_total", "counter", unread, of_nics("receiver_limited_s")
        full = "Of these, while the send buffer was full."
        yield "holmes_buffer_limited_seconds_total", "counter", full, of_nics("buffer_limited_s")
        stalls = "Times that a connection had bytes under way and none arrived."
        yield "holmes_stalls_total", "counter", stalls, between("stalls")
        yield "holmes_stalled_seconds_total", "counter", "Seconds that this lasted.", between("stalled_s")
        yield "holmes_operations_total", "counter", "Operations that ended well.", of_operations("completed")
        yield "holmes_operations_failed_total", "counter", "Operations that failed.", of_operations("failed")
        yield "holmes_operation_bytes_total", "counter", "Bytes of this rank's buffers.", of_operations("bytes")
        yield "holmes_operation_seconds_total", "counter", "Seconds from call to end.", of_operations("seconds")
        failures = [({"group": group, "error": error}, float(n)) for (group, error), n in self.failures.items()]
        yield "holmes_failures_total", "counter", "Communicators that failed.", failures
        alive = [({"group": group}, float(count)) for group, count in self.communicators.items()]
        yield "holmes_communicators", "gauge", "Communicators that are alive.", alive
        waits = [({"group": wait.group, "op": wait.op}, wait.seconds) for wait in self.waits]
        yield "holmes_wait_seconds", "gauge", "Since the call of the oldest operation that has not ended.", waits


def metrics() -> Metrics:
    """What the communicators of this process have done so far. Local, does not wait for anybody."""
    import os

    from holmes_comm import _C

    rank = {"rank": os.environ["RANK"]} if os.environ.get("RANK") else {}
    return Metrics.from_dict({**json.loads(_C.process_metrics()), "labels": {**rank, "host": _C.host_name()}})


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
