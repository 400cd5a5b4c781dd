"""A stress run for people: rates per kind of group and NIC, and what failed, with the command that makes it again."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rich.console import Console
from rich.table import Table

from holmes.lab.stress.loops import Loop
from holmes.lab.stress.result import StressResult
from holmes.lab.stress.settings import Settings

_SHOWN = 8


def progress_line(seconds: float, settings: Settings, loops: list[Loop]) -> str:
    """What rank 0's groups have done so far."""
    done = ", ".join(
        f"{loop.kind} {loop.operations} operations {loop.checked_bytes / 1e6:.0f} MB round {loop.round}"
        for loop in loops
    )
    return f"{min(seconds, settings.seconds):.0f} of {settings.seconds:g} s, all correct so far: {done or 'no group'}"


def rates(result: StressResult) -> list[dict[str, Any]]:
    """One row for each kind of group and class of NIC: ranks, bytes sent by all of them, Gbit/s of one on average."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for rank in result.ranks:
        for group in rank.groups:
            for nic, count in group.sent_bytes.items():
                nic_class = "shared memory" if nic == "shm" else result.nic_classes.get((rank.host, nic), "unknown")
                row = rows.setdefault(
                    (group.kind, nic_class),
                    {"kind": group.kind, "class": nic_class, "nics": [], "ranks": 0, "sent_bytes": 0, "gbps": 0.0},
                )
                if nic not in row["nics"]:
                    row["nics"].append(nic)
                row["ranks"] += 1
                row["sent_bytes"] += count
                row["gbps"] += count * 8e-9 / group.seconds if group.seconds > 0 else 0.0
    return [{**row, "gbps": row["gbps"] / row["ranks"]} for _, row in sorted(rows.items())]


def print_result(console: Console, result: StressResult, settings: Settings) -> None:
    """Prints the rates, then the totals or the failures."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("group", "class", "NICs", "ranks", "sent MB", "Gbit/s per rank"):
        table.add_column(header, justify="left" if header in ("group", "class", "NICs") else "right")
    for row in rates(result):
        sent, gbps = f"{row['sent_bytes'] / 1e6:.1f}", f"{row['gbps']:.3f}"
        table.add_row(row["kind"], row["class"], ", ".join(row["nics"]), str(row["ranks"]), sent, gbps)
    console.print(table)
    for line in summary(result, settings):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def summary(result: StressResult, settings: Settings) -> list[str]:
    """All correct; or who failed in which group and operation, who did not report, and how to see it again."""
    operations: dict[str, int] = defaultdict(int)
    checked = 0
    for rank in result.ranks:
        for group in rank.groups:
            operations[group.kind] += group.operations
            checked += group.checked_bytes
    total = (
        ", ".join(f"{kind} {count}" for kind, count in sorted(operations.items())) or "none: every group has one rank"
    )
    lines = [f"operations checked: {total}; {checked / 1e6:.0f} MB of results; seed {settings.seed}"]
    if result.is_interrupted:
        lines.append("interrupted before its time was over")
    if result.exit_code == 0:
        return [*lines, "all correct"]
    failures = result.failures
    for rank, group in failures[:_SHOWN]:
        what = "WRONG RESULT" if group.is_wrong else "failed"
        lines.append(
            f"{what}: rank {rank.rank} on {rank.host}, {group.kind} group of ranks {', '.join(map(str, group.ranks))}, "
            f"seed {settings.seed}, round {group.failed_round}: {group.failure}"
        )
    if len(failures) > _SHOWN:
        lines.append(f"and {len(failures) - _SHOWN} groups more")
    lines += [f"failed: rank {rank.rank} on {rank.host}: {rank.failure}" for rank in result.ranks if rank.failure]
    if result.missing:
        lines.append(f"no report from ranks {', '.join(map(str, result.missing))}: they ended or hang")
    if failures:
        lines.append(f"again (with the same launcher): {settings.replay_command(failures[0][1].failed_round)}")
    return lines
