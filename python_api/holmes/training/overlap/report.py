"""Report: how much of a step's communication was hidden behind compute, by group and kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holmes.training.overlap.transfers import Lane, Transfer


@dataclass(frozen=True)
class GroupReport:
    """One kind of collective of one group in one step.

    `communication_s`: time in which they ran, each from the end of the one before it on the group (or its start) to its
    own end; it includes waiting for ranks that come later. `exposed_s`: time this rank's caller stood waiting for them.
    `size_bytes`: their larger buffers. `nics`: what the group's connections use; empty where the backend does not tell.
    """

    group: str
    nics: tuple[str, ...]
    kind: str
    count: int
    size_bytes: int
    communication_s: float
    exposed_s: float


@dataclass(frozen=True)
class TransferSpan:
    """One collective of a step; CLOCK_MONOTONIC seconds."""

    group: str
    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepReport:
    """One optimizer step on this rank, from the end of the one before it to its own end, in seconds.

    An all-gather counts in the step in which it ended: the one after that which started it.
    """

    step: int
    step_s: float
    communication_s: float  # time in which at least one collective ran
    exposed_s: float
    groups: tuple[GroupReport, ...]
    spans: tuple[TransferSpan, ...]

    @property
    def hidden_share(self) -> float:
        """The share of the communication time that nobody waited for, 0 to 1; 1 without communication."""
        return 1.0 - min(self.exposed_s / self.communication_s, 1.0) if self.communication_s > 0 else 1.0

    def summary(self) -> str:
        """One line for the log."""
        parts = [
            f"{g.kind} {g.group} ({'+'.join(g.nics) or 'NIC unknown'}) {1e3 * g.communication_s:.1f} ms, "
            f"exposed {1e3 * g.exposed_s:.1f}"
            for g in self.groups
        ]
        return (
            f"step {self.step}: {1e3 * self.step_s:.1f} ms, communication {1e3 * self.communication_s:.1f} ms, "
            f"exposed {1e3 * self.exposed_s:.1f} ms ({self.hidden_share:.0%} hidden)"
            + "".join(f"; {part}" for part in parts)
        )


def make_report(step: int, step_s: float, ended: Sequence[tuple[Lane, Sequence[tuple[Transfer, float]]]]) -> StepReport:
    """Local. `ended`: each lane's transfers of the step with the times they began to run."""
    rows: dict[tuple[str, str], list[tuple[Lane, Transfer, float]]] = {}
    for lane, transfers in ended:
        for transfer, start in transfers:
            rows.setdefault((lane.label, transfer.kind), []).append((lane, transfer, start))
    groups = tuple(
        GroupReport(
            group=label,
            nics=members[0][0].nics,
            kind=kind,
            count=len(members),
            size_bytes=sum(t.size_bytes for _, t, _ in members),
            communication_s=sum((t.ended_s or start) - start for _, t, start in members),
            exposed_s=sum(t.exposed_s for _, t, _ in members),
        )
        for (label, kind), members in rows.items()
    )
    spans = tuple(
        TransferSpan(label, kind, start, t.ended_s or start)
        for (label, kind), members in rows.items()
        for _, t, start in members
    )
    busy_s = union_s((span.start_s, span.end_s) for span in spans)
    return StepReport(step, step_s, busy_s, sum(g.exposed_s for g in groups), groups, spans)


def union_s(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what the spans (start, end) cover."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
