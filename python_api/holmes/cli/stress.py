"""`holmes stress`."""

from __future__ import annotations

import json
import random
import sys
from typing import Annotated

import typer
from rich.console import Console

from holmes.bench import parse_bytes
from holmes.job_store import in_job, join_job
from holmes.stress import RankResult, Settings, StressResult, run_stress
from holmes.stress.gather import gather_results
from holmes.stress.loops import Loop
from holmes.stress.report import print_result, progress_line, rates, verdict

_EVERY_S = 5.0  # between lines of progress
_AFTER_FAILURE_S = 10.0


def stress(
    seconds: Annotated[float, typer.Option(help="How long new operations are started.")] = 20.0,
    seed: Annotated[
        int | None, typer.Option(help="Of sizes, types and data, to see a failure again. Default: a random one.")
    ] = None,
    max_bytes: Annotated[str, typer.Option(help="Largest buffer: 64K, 4M (units of 1024).")] = "4M",
    tensor: Annotated[int, typer.Option(help="Ranks of a tensor group; 0: two where hosts have an even number.")] = 0,
    pipeline: Annotated[int, typer.Option(help="Stages; 0: one for each cluster.")] = 0,
    first_round: Annotated[int, typer.Option(help="Begin with this round of each group.")] = 0,
    timeout_s: Annotated[float, typer.Option(help="Deadline of one operation.")] = 60.0,
    join_timeout_s: Annotated[float, typer.Option(min=0.1, help="How long to wait for all ranks to come.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    corrupt: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Communication shaped like training, without the training: on the NICs of a plan, every result checked.

    At once and for so long: data-parallel reduce-scatter and all-gather, pipeline send and receive, tensor all-reduce,
    each in its own groups, with random sizes and types. Run it as a job (torchrun, `holmes testbed run`). Rank 0
    prints. Exit code: 0 where all was correct, 1 where anything failed, 2 where it cannot start.
    """
    try:
        if not in_job():
            raise ValueError(
                "it needs several ranks; on this machine alone: torchrun --nproc-per-node 4 --no-python holmes stress, "
                "or holmes testbed run -- holmes stress"
            )
        with join_job("holmes/stress", join_timeout_s) as job:
            own = seed if seed is not None else random.SystemRandom().randrange(2**31)
            if job.rank == 0:
                job.store.set("holmes/stress/seed", str(own))
            agreed = int(job.store.get("holmes/stress/seed"))
            settings = Settings(
                seconds, agreed, parse_bytes(max_bytes), tensor, pipeline, first_round, timeout_s, corrupt
            )
            progress = _Progress(settings) if job.rank == 0 else None
            mine, topology = run_stress(job.store, job.rank, job.size, "holmes/stress", settings, progress)
            failed = any(group.failure for group in mine.groups)
            if failed and job.rank != 0:
                _print_own(mine)  # now: rank 0 may be gone
            # After a failure all others have been told; without one they may be in their last round.
            wait_s = _AFTER_FAILURE_S if failed else settings.round_limit_s
            result = gather_results(job.store, job.size, "holmes/stress", mine, topology, wait_s)
            if result is not None:
                _print(result, settings, as_json)
                failed = result.exit_code != 0
    except (ValueError, OSError, RuntimeError) as error:
        typer.echo(f"holmes stress: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(int(failed))


def _print_own(mine: RankResult) -> None:
    for group in mine.groups:
        if group.failure and not group.is_aborted:
            typer.echo(f"holmes stress: rank {mine.rank} on {mine.host}, {group.kind}: {group.failure}", err=True)


def _print(result: StressResult, settings: Settings, as_json: bool) -> None:
    if as_json:
        ranks = [rank.to_dict() for rank in result.ranks]
        text = {"seed": settings.seed, "exit_code": result.exit_code, "missing": result.missing, "rates": rates(result)}
        typer.echo(json.dumps({**text, "verdict": verdict(result, settings), "ranks": ranks}, indent=2))
    else:
        print_result(Console(), result, settings)


class _Progress:
    """A line now and then, to stderr: rewritten in place on a terminal."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._last_s = 0.0

    def __call__(self, seconds: float, loops: list[Loop]) -> None:
        terminal = sys.stderr.isatty()
        if terminal or seconds - self._last_s >= _EVERY_S:
            self._last_s = seconds
            typer.echo(
                ("\r" if terminal else "") + progress_line(seconds, self._settings, loops), err=True, nl=not terminal
            )
