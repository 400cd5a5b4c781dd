"""`holmes top`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live

from holmes.tools.cli.output import JsonFile, plain_console, show
from holmes.tools.top.rates import Row, rows_of
from holmes.tools.top.sources import Sample, Source, source_of
from holmes.tools.top.table import table_of
from holmes_comm.errors import UsageError

_LINES_AROUND = 6  # title, header, and what is said of silent ranks


def top(
    places: Annotated[
        list[str] | None,
        typer.Argument(
            help="Process numbers, or addresses of metrics pages of any host (HOLMES_METRICS_PORT): HOST:PORT or "
            "HOST:FIRST-LAST. Default: all of this user's processes on this machine.",
            show_default=False,
        ),
    ] = None,
    testbed: Annotated[bool, typer.Option("--testbed", help="Only processes of `holmes testbed`.")] = False,
    every_s: Annotated[
        float, typer.Option("--every", min=0.2, max=3600.0, help="Seconds from one look to the next.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Two looks, one table, and the end.")] = False,
    json_file: JsonFile = None,
) -> None:
    """A running job, live: each rank's groups and NICs, their rates and retransmissions, and who waits in what.

    Nothing need be set for ranks on this machine. Those of other hosts serve their metrics (HOLMES_METRICS_PORT and
    HOLMES_METRICS_ADDRESS). `out` and `in` are Gbit/s, `retr` is TCP segments retransmitted, `in operation` the
    oldest one that has not ended. --json implies --once. Ctrl-C ends it. Exit code 2 where nobody answers.
    """
    source = source_of(places or [], testbed)
    before = source()
    if not any(sample.metrics for job in before for sample in job):
        raise UsageError(_nobody(places or [], [sample for job in before for sample in job]))
    console = plain_console()
    if once or json_file is not None:
        time.sleep(every_s)
        jobs = _rows(before, source())
        result = {"every_s": every_s, "jobs": jobs}
        show(json_file, result, lambda: console.print(_screen(jobs, every_s, console.width, None)))
        return
    try:
        _watch(console, source, before, every_s)
    except KeyboardInterrupt:
        return


def _watch(console: Console, source: Source, before: list[list[Sample]], every_s: float) -> None:
    """Until Ctrl-C, or until nobody is left."""
    if not console.is_terminal:
        for jobs in _looks(source, before, every_s):
            console.print(_screen(jobs, every_s, console.width, None))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for jobs in _looks(source, before, every_s):
            room = max(4, console.height // max(1, len(jobs)) - _LINES_AROUND)
            live.update(_screen(jobs, every_s, console.width, room), refresh=True)
    console.print("nobody answers any more")


def _looks(source: Source, before: list[list[Sample]], every_s: float) -> Iterator[list[list[Row]]]:
    while True:
        time.sleep(every_s)
        now = source()
        if not any(sample.metrics for job in now for sample in job):
            return
        yield _rows(before, now)
        before = now


def _rows(before: list[list[Sample]], now: list[list[Sample]]) -> list[list[Row]]:
    earlier = [sample for job in before for sample in job]
    return [rows_of(earlier, job) for job in now]


def _screen(jobs: list[list[Row]], every_s: float, width: int, room: int | None) -> Group:
    return Group(*(table_of(rows, every_s, width, room) for rows in jobs))


def _nobody(places: list[str], samples: list[Sample]) -> str:
    if places and not places[0].isdigit():
        told = "; ".join(f"{sample.key}: {sample.problem}" for sample in samples[:3])
        return f"{told}; set HOLMES_METRICS_PORT there, and HOLMES_METRICS_ADDRESS to be reached from other hosts"
    who = f"{', '.join(places)} is no process that has a communicator, or it does not answer" if places else ""
    return (
        f"{who or 'no process with a communicator answered'} (other users' and other hosts' are not asked; "
        "HOLMES_FLIGHT_RECORDER=0 turns it off); for other hosts set HOLMES_METRICS_PORT and name HOST:PORT"
    )
