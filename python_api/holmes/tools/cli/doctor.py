"""`holmes doctor`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holmes.planning.plan.plan import Plan
from holmes.tools.cli.output import JsonFile, plain_console, show
from holmes.tools.doctor import Diagnosis, examine
from holmes.tools.doctor.examine import examine_here
from holmes.tools.doctor.finding import ERROR, NOTE, SEVERITIES, WARNING
from holmes.tools.job_store import in_job, join_job
from holmes.words import count


def doctor(
    json_file: JsonFile = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Bound of one connection attempt.")] = 3.0,
    measure_s: Annotated[
        float, typer.Option(min=0.0, help="Also measure rates, to find slow NICs; takes about twice that.")
    ] = 0.0,
    plan: Annotated[
        Path | None, typer.Option(help="Also hold the hosts against this plan's .yaml or .json file; rank 0 reads it.")
    ] = None,
    join_timeout_s: Annotated[float, typer.Option(min=0.1, help="How long to wait for all ranks to come.")] = 60.0,
) -> None:
    """Looks over the hosts of a job before it starts: what would make it fail, hang or be slow, each with its fix.

    Run it as the job would be, with one or more ranks per host (torchrun, `holmes testbed run`); without a job it looks
    at this host only. Rank 0 prints. Exit code: 0, also with warnings; 1 with errors; 2 where the ranks do not meet.
    """
    diagnosis = (
        _in_job(timeout_s, measure_s, join_timeout_s, plan)
        if in_job()
        else examine_here(None if plan is None else Plan.load(plan))
    )
    if diagnosis is None:
        return
    show(json_file, diagnosis.to_dict(), lambda: print_diagnosis(plain_console(), diagnosis))
    raise typer.Exit(diagnosis.exit_code)


def _in_job(timeout_s: float, measure_s: float, join_timeout_s: float, plan: Path | None) -> Diagnosis | None:
    with join_job("holmes/doctor", join_timeout_s) as job:
        planned = Plan.load(plan) if plan is not None and job.rank == 0 else None
        return examine(job.store, job.rank, job.size, "holmes/doctor", timeout_s, measure_s, planned)


_STYLE = {ERROR: "bold red", WARNING: "yellow", NOTE: "dim"}


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Prints a table of the findings, then what was looked at."""
    if diagnosis.findings:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for header in ("", "host", "NIC", "what is wrong", "what to do"):
            table.add_column(header, overflow="fold", ratio=3 if header.startswith("what") else None)
        for finding in diagnosis.findings:
            severity = Text(finding.severity, style=_STYLE[finding.severity])
            problem = Text.assemble((f"{finding.check}: ", "bold"), finding.problem)
            table.add_row(severity, Text(finding.host), Text(finding.nic), problem, Text(finding.fix))
        console.print(table)
    for cluster in diagnosis.clusters:
        console.print(cluster, markup=False, highlight=False)
    console.print(summary(diagnosis), markup=False, highlight=False, style="green" if not _serious(diagnosis) else "")


def summary(diagnosis: Diagnosis) -> str:
    """How many hosts and ranks, what was checked, and what came of it, in one or two lines."""
    counts = Counter(finding.severity for finding in diagnosis.findings)
    hosts = f"{count(len(diagnosis.hosts), 'host')}, {count(diagnosis.ranks, 'rank')}"
    said = ", ".join(count(counts[kind], kind) for kind in SEVERITIES if counts[kind])
    lines = [f"{'All good' if not _serious(diagnosis) else 'Found'}: {said or 'nothing to report'} ({hosts})."]
    lines.append(f"Checked: {', '.join(diagnosis.checked)}.")
    if diagnosis.skipped:
        lines.append(f"Not checked, for want of a second host (run it as a job): {', '.join(diagnosis.skipped)}.")
    return "\n".join(lines)


def _serious(diagnosis: Diagnosis) -> bool:
    return any(finding.severity != NOTE for finding in diagnosis.findings)
