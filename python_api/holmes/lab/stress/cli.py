"""`holmes stress`."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from holmes.interrupt import ending_early
from holmes.lab.stress import RankResult, Settings, StressResult, run_stress
from holmes.lab.stress.loops import Loop
from holmes.lab.stress.run import gather_results
from holmes.lab.stress.summary import print_result, progress_line, rates, summary
from holmes.tools.bench import parse_bytes
from holmes.tools.cli.output import JsonFile, plain_console, show
from holmes.tools.cli.refusal import refuse_given
from holmes.tools.job_store import in_job, join_job
from holmes_comm.errors import UsageError

_EVERY_S = 5.0  # between lines of progress
_AFTER_FAILURE_S = 10.0
_AFTER_INTERRUPT_S = 4.0  # ranks leave a round that is under way one by one
_MAX_BYTES, _FAULT_BYTES = "4M", "256K"
_OF_A_JOB = ("tensor", "pipeline", "first_round", "join_timeout_s")
_OF_THE_TESTBED = ("episode", "save", "slack_s", "lease_s")


def stress(
    context: typer.Context,
    seconds: Annotated[float, typer.Option(min=0.001, help="How long new operations (episodes) are started.")] = 20.0,
    minutes: Annotated[float | None, typer.Option(min=0.001, help="The same, in minutes.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of sizes, types and data, to see a failure again. Default: a random one.")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(help="Largest buffer: 64K, 4M (units of 1024). Default: 4M, with faults 256K.")
    ] = None,
    tensor: Annotated[
        int, typer.Option(min=0, help="Ranks of a tensor group; 0: two where hosts have an even number.")
    ] = 0,
    pipeline: Annotated[int, typer.Option(min=0, help="Stages; 0: one for each cluster.")] = 0,
    first_round: Annotated[int, typer.Option(min=0, help="Begin with this round of each group.")] = 0,
    timeout_s: Annotated[
        float | None, typer.Option(min=0.001, help="Deadline of one operation; default 60, with faults 5.")
    ] = None,
    slack_s: Annotated[
        float, typer.Option(min=0.1, help="With faults: how much later than its deadline a report may come.")
    ] = 2.0,
    lease_s: Annotated[
        float, typer.Option(min=0.5, help="With --partitions: of the job's ranks; more beside other loads.")
    ] = 4.0,
    join_timeout_s: Annotated[float, typer.Option(min=0.1, help="How long to wait for all ranks to come.")] = 60.0,
    testbed: Annotated[bool, typer.Option(help="On emulated nodes, with --faults, --partitions or --peers.")] = False,
    faults: Annotated[str, typer.Option(help='Injected faults: "all", names as kill,stop, or all,-kill.')] = "",
    partitions: Annotated[
        bool, typer.Option(help="An elastic job while its nodes and its store are split in every way.")
    ] = False,
    peers: Annotated[str, typer.Option(help='Other libraries under faults: "all", or gloo,openmpi.')] = "",
    episode: Annotated[
        int | None, typer.Option(min=0, help="With faults or partitions: this episode of the seed only.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="With faults or partitions: write SAVE.json and SAVE.md.")] = None,
    json_file: JsonFile = None,
    corrupt: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Communication shaped like training, without the training: on the NICs of a plan, every result checked.

    At once and for so long: data-parallel reduce-scatter and all-gather, pipeline send and receive, tensor all-reduce,
    each in its own groups, with random sizes and types. Run it as a job (torchrun, `holmes testbed run`). Rank 0
    prints. With --testbed and --faults it makes its own nodes and ranks, breaks them again and again, and checks that
    every survivor says what is broken (docs/stress.md). Ctrl-C and SIGTERM end it early, with the result till then.
    Exit code: 0 where all was correct, 1 where anything failed, 2 where it cannot start, 130 after Ctrl-C, 143 after
    SIGTERM.
    """
    most_bytes = parse_bytes(max_bytes or (_FAULT_BYTES if testbed else _MAX_BYTES))
    if minutes is not None:
        refuse_given(context, ("seconds",), "--minutes says how long")
        seconds = 60 * minutes
    if testbed:
        refuse_given(context, _OF_A_JOB, "it is of a load alone, without --testbed")
        if partitions:
            refuse_given(context, ("max_bytes", "slack_s"), "--partitions is a run of its own")
        else:
            refuse_given(context, ("lease_s",), "it is of --partitions")
        options: dict[str, Any] = {
            "seconds": seconds,
            "seed": seed,
            "episode": episode,
            "save": save,
            "timeout_s": timeout_s,
            "json_file": json_file,
        }
        with ending_early() as interrupt:
            if partitions:
                code = _with_partitions(faults, peers, lease_s=lease_s, **options)
            else:
                code = _with_faults(faults, peers, max_bytes=most_bytes, slack_s=slack_s, **options)
        raise typer.Exit(interrupt.exit_code if interrupt.has_come else code)
    if faults or peers or partitions:
        raise UsageError(
            "--faults, --partitions and --peers need --testbed: faults are injected on emulated nodes only"
        )
    refuse_given(context, _OF_THE_TESTBED, "it is of --testbed")
    if not in_job():
        raise UsageError(
            "it needs several ranks; on this machine alone: torchrun --nproc-per-node 4 --no-python holmes stress, "
            "or holmes testbed run -- holmes stress"
        )
    with join_job("holmes/stress", join_timeout_s) as job, ending_early() as interrupt:
        own = seed if seed is not None else random.SystemRandom().randrange(2**31)
        if job.rank == 0:
            job.store.set("holmes/stress/seed", str(own))
        agreed = int(job.store.get("holmes/stress/seed"))
        settings = Settings(
            seconds,
            agreed,
            most_bytes,
            tensor,
            pipeline,
            first_round,
            timeout_s or 60.0,
            corrupt=corrupt,
        )
        if job.rank == 0:  # now: SIGKILL ends it without a summary
            typer.echo(f"holmes stress: seed {agreed} (again: --seed {agreed})", err=True)
        progress = _Progress(settings) if job.rank == 0 else None
        mine, topology = run_stress(job.store, job.rank, job.size, "holmes/stress", settings, progress)
        failed = any(group.failure for group in mine.groups)
        if failed and job.rank != 0:
            _print_own(mine)  # now: rank 0 may be gone
        # After a failure all others have been told; without one they may be in their last round.
        wait_s = _AFTER_FAILURE_S if failed else settings.round_limit_s
        wait_s = _AFTER_INTERRUPT_S if mine.is_interrupted else wait_s
        result = gather_results(job.store, job.size, "holmes/stress", mine, topology, wait_s)
        if result is not None:
            _print(result, settings, json_file)
            failed = result.exit_code != 0
    raise typer.Exit(interrupt.exit_code if interrupt.has_come else int(failed))


def _with_faults(faults: str, peers: str, **options: Any) -> int:
    from holmes.lab.stress.cli_faults import stress_with_faults  # the testbed and more: only where it is asked for

    if not (faults or peers):
        raise UsageError(
            "--testbed needs --faults, --partitions or --peers; a load alone: holmes testbed run -- holmes stress"
        )
    return stress_with_faults(faults, peers, **options)


def _with_partitions(faults: str, peers: str, *, timeout_s: float | None, **options: Any) -> int:
    from holmes.lab.stress.cli_faults import stress_with_partitions

    if faults or peers or timeout_s is not None:
        raise UsageError("--partitions comes without --faults, --peers and --timeout-s: it is a run of its own")
    return stress_with_partitions(**options)


def _print_own(mine: RankResult) -> None:
    for group in mine.groups:
        if group.failure and not group.is_aborted:
            typer.echo(f"holmes stress: rank {mine.rank} on {mine.host}, {group.kind}: {group.failure}", err=True)


def _print(result: StressResult, settings: Settings, json_file: Path | None) -> None:
    ranks = [rank.to_dict() for rank in result.ranks]
    found = {"seed": settings.seed, "exit_code": result.exit_code, "missing": result.missing, "rates": rates(result)}
    found |= {"interrupted": result.is_interrupted, "summary": summary(result, settings), "ranks": ranks}
    show(json_file, found, lambda: print_result(plain_console(), result, settings))


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
