"""`holmes doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holmes.planning.plan.plan import Plan
from holmes.tools.doctor import Diagnosis, examine
from holmes.tools.doctor.examine import examine_here
from holmes.tools.doctor.report import print_diagnosis
from holmes.tools.job_store import in_job, join_job


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
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
    try:
        diagnosis = _in_job(timeout_s, measure_s, join_timeout_s, plan) if in_job() else examine_here()
    except (ValueError, OSError, RuntimeError) as error:
        typer.echo(f"holmes doctor: {error}", err=True)
        raise typer.Exit(2) from None
    if diagnosis is None:
        return
    if as_json:
        typer.echo(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        print_diagnosis(Console(), diagnosis)
    raise typer.Exit(diagnosis.exit_code)


def _in_job(timeout_s: float, measure_s: float, join_timeout_s: float, plan: Path | None) -> Diagnosis | None:
    with join_job("holmes/doctor", join_timeout_s) as job:
        planned = Plan.load(plan) if plan is not None and job.rank == 0 else None
        return examine(job.store, job.rank, job.size, "holmes/doctor", timeout_s, measure_s, planned)
