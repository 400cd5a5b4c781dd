"""Two samples of a process as rows: what each group did on each NIC in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holmes.tools.top.sources import Sample
from holmes_comm.process_metrics import Metrics

__all__ = ["Row", "rows_of"]


@dataclass(frozen=True)
class Row:
    """A group of a rank on one NIC and path; `nic` and all rates are None where its connections are not known (NCCL).

    Attributes:
        sent_gbps: Gbit/s in the interval; received_gbps alike.
        operations_per_s: of the group, which ended well; only on its first row, as the following.
        retransmitted: TCP segments sent again in the interval; all_retransmitted: since the process began.
        stalls: how often a connection had bytes under way and none arrived, in the interval.
        path: "inter" between clusters, "intra" inside; round_trip_s and path_changes: as in `NicMetrics`.
        waits_in: the oldest operation that has not ended, as in errors.
        waits_s: since its call.
        problem: why the process did not answer; then there is nothing else.
    """

    rank: int
    host: str
    group: str = ""
    nic: str | None = None
    sent_gbps: float | None = None
    received_gbps: float | None = None
    operations_per_s: float | None = None
    retransmitted: int = 0
    all_retransmitted: int = 0
    stalls: int = 0
    path: str = "intra"
    round_trip_s: float = 0.0
    path_changes: int = 0
    waits_in: str = ""
    waits_s: float = 0.0
    problem: str = ""


_NOTHING = Metrics((), (), {}, {}, {})


def rows_of(before: Sequence[Sample], now: Sequence[Sample]) -> list[Row]:
    """By rank, group, NIC and path; the groups that are alive. A process that did not answer before has rates of 0."""
    earlier = {sample.key: sample for sample in before}
    return [row for sample in now for row in _rows(earlier.get(sample.key), sample)]


def _rows(before: Sample | None, now: Sample) -> list[Row]:
    if now.metrics is None:
        return [Row(now.rank, now.host, problem=now.problem)]
    was = now.metrics if before is None or before.metrics is None else before.metrics
    seconds = max(now.taken_s - before.taken_s, 1e-3) if before else 1.0
    old = {(nic.group, nic.nic, nic.path): nic for nic in was.nics}
    done_before, done = _completed(was), _completed(now.metrics)
    waits = {wait.group: wait for wait in now.metrics.waits}
    rows = []
    for group in sorted(now.metrics.communicators):
        wait = waits.get(group)
        first = {
            "operations_per_s": max(0, done.get(group, 0) - done_before.get(group, 0)) / seconds,
            "waits_in": f"{wait.op} #{wait.sequence}" if wait else "",
            "waits_s": wait.seconds if wait else 0.0,
        }
        nics = [nic for nic in now.metrics.nics if nic.group == group and (nic.connections or nic.sent_bytes)]
        for nic in nics:
            base = old.get((group, nic.nic, nic.path))
            sent, received = (base.sent_bytes, base.received_bytes) if base else (0, 0)
            rows.append(
                Row(
                    now.rank,
                    now.host,
                    group,
                    nic.nic,
                    max(0, nic.sent_bytes - sent) * 8 / seconds / 1e9,
                    max(0, nic.received_bytes - received) * 8 / seconds / 1e9,
                    retransmitted=max(0, nic.retransmitted_segments - (base.retransmitted_segments if base else 0)),
                    all_retransmitted=nic.retransmitted_segments,
                    stalls=max(0, nic.stalls - (base.stalls if base else 0)),
                    path=nic.path,
                    round_trip_s=nic.round_trip_s,
                    path_changes=nic.path_changes,
                    **(first if nic is nics[0] else {}),  # type: ignore[arg-type]
                )
            )
        if not nics:
            rows.append(Row(now.rank, now.host, group, **first))  # type: ignore[arg-type]
    return rows


def _completed(metrics: Metrics) -> dict[str, int]:
    found: dict[str, int] = {}
    for operation in metrics.operations:
        found[operation.group] = found.get(operation.group, 0) + operation.completed
    return found
