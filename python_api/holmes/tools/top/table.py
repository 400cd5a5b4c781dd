"""Rows as a table that fits 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from holmes.tools.top.rates import Row
from holmes.words import count

__all__ = ["table_of"]

_LONG_WAIT_S = 1.0
_LEAST = 80


def table_of(rows: Sequence[Row], every_s: float, width: int, most_rows: int | None = None) -> Group:
    """`most_rows`: what the terminal has room for; those that wait longest, and who is silent, are kept."""
    shown = list(rows)
    if most_rows is not None and len(shown) > most_rows:
        kept = sorted(shown, key=lambda row: (not row.problem, -row.waits_s))[: max(1, most_rows)]
        shown = [row for row in shown if any(row is one for one in kept)]
    ranks = {(row.rank, row.host): bool(row.problem) for row in rows}
    silent = sum(ranks.values())
    hosts = len({host for _, host in ranks})
    title = f"{count(len(ranks), 'rank')} on {count(hosts, 'host')}" + (f", {silent} silent" if silent else "")
    title += f"; Gbit/s and operations of the last {every_s:g} s"
    more = max(0, width - _LEAST)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for header, most in (("rank", 4), ("host", 9 + more // 4), ("group", 12 + more // 3), ("NIC", 8 + more // 8)):
        table.add_column(header, justify="right" if header == "rank" else "left", no_wrap=True, max_width=most)
    for header, most in (("out", 6), ("in", 6), ("op/s", 6), ("retr", 5)):
        table.add_column(header, justify="right", no_wrap=True, max_width=most)
    table.add_column("in operation", no_wrap=True, max_width=17 + more // 4)
    last: tuple[int, str] | None = None
    for row in shown:
        place = (str(row.rank) if row.rank >= 0 else "?", row.host) if (row.rank, row.host) != last else ("", "")
        last = (row.rank, row.host)
        if row.problem:
            table.add_row(*place, *[""] * 6, Text("silent", style="bold red"))
            continue
        table.add_row(
            *place,
            row.group,
            _nic(row),
            _rate(row.sent_gbps),
            _rate(row.received_gbps),
            _rate(row.operations_per_s),
            Text(str(row.retransmitted), style="yellow" if row.retransmitted else ""),
            _wait(row),
        )
    hidden = len(rows) - len(shown)
    notes = [f"rank {row.rank if row.rank >= 0 else '?'} ({row.host}): {row.problem}" for row in shown if row.problem]
    lines = [Text(note, style="red", overflow="fold") for note in notes]
    between = [row for row in shown if row.path == "inter"]
    if between:
        longest_ms = 1e3 * max(row.round_trip_s for row in between)
        changes = sum(row.path_changes for row in between)
        text = f"* between clusters; round trip up to {longest_ms:.3g} ms, {count(changes, 'change')} of rate"
        lines.append(Text(text))
    if stalls := sum(row.stalls for row in shown):
        lines.append(Text(f"{count(stalls, 'stall')}: bytes were under way and none arrived", style="yellow"))
    return Group(Text(title), table, *lines, *([Text(f"{count(hidden, 'row')} more")] if hidden else []))


def _nic(row: Row) -> str:
    return ("*" if row.path == "inter" else "") + (row.nic or "-")


def _rate(value: float | None) -> str:
    """Three digits, two of small ones: six characters at most."""
    if value is None:
        return ""
    if value < 1e-3:
        return "0"
    return f"{value:.0f}" if value >= 100 else f"{value:.{2 if value < 0.01 else 3}g}"


def _wait(row: Row) -> Text:
    if not row.waits_in:
        return Text("")
    style = "bold red" if row.waits_s >= _LONG_WAIT_S else ""
    name = row.waits_in.partition(" ")[0]
    return Text(f"{row.waits_s:.1f} s {name}", style=style)
