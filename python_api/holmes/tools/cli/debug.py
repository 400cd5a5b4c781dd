"""`holmes debug`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from holmes import files
from holmes.tools.cli.output import JsonFile, say, show
from holmes.tools.debug.diagnose import diagnose_job
from holmes.tools.debug.members import JobRecord, jobs_of
from holmes.tools.debug.sources import Answers, ask_folder, ask_processes, read_folder
from holmes.tools.debug.torch_traces import write_torch_traces
from holmes.tools.debug.trace import chrome_trace, read_timeline
from holmes.words import count
from holmes_comm.errors import UsageError


def debug(
    places: Annotated[
        list[str] | None,
        typer.Argument(help="A folder of flight records, or process numbers. Default: all of this user's processes."),
    ] = None,
    testbed: Annotated[bool, typer.Option("--testbed", help="Only processes of `holmes testbed`.")] = False,
    ask: Annotated[
        bool, typer.Option("--ask", help="Ask all processes that have this folder for new records, on all hosts.")
    ] = False,
    wait_s: Annotated[float, typer.Option(min=0.0, help="With --ask: how long they have.")] = 3.0,
    json_file: JsonFile = None,
    torch_traces: Annotated[
        Path | None,
        typer.Option(help="A folder: also writes there what PyTorch's own analyser (fr_trace) reads, a file a rank."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write what all ranks did as one trace for Perfetto or chrome://tracing (.json)."),
    ] = None,
    steps: Annotated[
        Optional[list[Path]],  # noqa: UP045 (typer reads it at run time)
        typer.Option(help="With --trace: a file of an optimizer's tracing(), to be in it too; again for each rank."),
    ] = None,
    all_jobs: Annotated[bool, typer.Option("--all", help="Of a folder also older jobs, not only the newest.")] = False,
) -> None:
    """Says why a job hangs or failed: who waits for whom, in which operation, on which NIC; one sentence per culprit.

    Asks running processes of this user on this machine (nothing need be set for that), or reads the files that every
    rank writes on failure with HOLMES_FLIGHT_RECORDER_DIR. --trace shows the newest job's last operations on a time
    line of all ranks. Exit code: 0 where nothing is wrong, 1 with findings, 2 where there is nothing to look at.
    """
    files.check_writable(trace)
    if steps and trace is None:
        raise UsageError("--steps is for --trace; name the trace's file")
    timelines = [read_timeline(path) for path in steps or ()]
    answers = _collect(places or [], testbed, ask, wait_s)
    for note in answers.notes:
        typer.echo(f"holmes debug: {note}", err=True)
    jobs = jobs_of(answers.records, answers.silent)
    if not jobs:
        raise UsageError(_nothing(places or []))
    if not all_jobs and _is_folder(places or []):  # what answered itself is running
        jobs = jobs[:1]
    if torch_traces is not None:
        write_torch_traces([m.record for m in jobs[0].members if m.record is not None], torch_traces)
    if trace is not None:
        files.replace(trace, json.dumps(chrome_trace(jobs[0], timelines)) + "\n")
    found = [(job, diagnose_job(job)) for job in jobs]
    rows = [{"processes": _processes(job), "findings": [f.to_dict() for f in findings]} for job, findings in found]

    def printed() -> None:
        for job, findings in found:
            _print(job, [(finding.is_cause, finding.sentence) for finding in findings])

    show(json_file, {"jobs": rows}, printed)
    raise typer.Exit(int(any(findings for _, findings in found)))


def _nothing(places: list[str]) -> str:
    """What to say where nobody told anything."""
    if places and not places[0].isdigit():
        return f"{places[0]} has no record of a process that has a communicator; is it HOLMES_FLIGHT_RECORDER_DIR's?"
    who = f"{', '.join(places)} is no process that has a communicator, or it does not answer" if places else ""
    return (
        f"{who or 'no process with a communicator answered'} (other users' and other hosts' are not asked; "
        "HOLMES_FLIGHT_RECORDER=0 turns it off); for several hosts set HOLMES_FLIGHT_RECORDER_DIR to a shared folder "
        "and name it here"
    )


def _is_folder(places: list[str]) -> bool:
    return not all(place.isdigit() for place in places)


def _collect(places: list[str], testbed: bool, ask: bool, wait_s: float) -> Answers:
    if not _is_folder(places):
        if ask:
            raise UsageError("--ask is for a folder (HOLMES_FLIGHT_RECORDER_DIR); name it")
        return ask_processes([int(place) for place in places], testbed_only=testbed)
    if len(places) > 1:
        raise UsageError(f"{' '.join(places)}: name one folder, or process numbers only")
    folder = Path(places[0])
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder and no process number")
    return ask_folder(folder, wait_s) if ask else read_folder(folder)


def _processes(job: JobRecord) -> list[dict[str, object]]:
    return [
        {"rank": member.number, "host": member.host, "pid": member.pid, "answered": member.record is not None}
        for member in job.members
    ]


def _print(job: JobRecord, sentences: list[tuple[bool, str]]) -> None:
    answered = sum(member.record is not None for member in job.members)
    hosts = len({member.host for member in job.members})
    typer.echo(
        f"{count(len(job.members), 'process')} on {count(hosts, 'host')}, {answered} told; "
        f"{count(len(job.communicators), 'communicator')}"
    )
    for is_cause, sentence in sentences:
        say(f"{'  ' if is_cause else '  follows: '}{sentence}")
    if not sentences:
        typer.echo("  nobody waits and nothing has failed")
