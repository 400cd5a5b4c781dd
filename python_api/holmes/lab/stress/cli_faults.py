"""`holmes stress --testbed --faults ...`: injected faults, and the same ones under other libraries."""

from __future__ import annotations

import datetime
import json
import os
import platform
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

import holmes_comm
from holmes import files
from holmes.lab.stress.elastic import ELASTIC_FAULTS, run_elastic_faults, run_partitions
from holmes.lab.stress.faults import FAULTS, FaultSettings, run_faults
from holmes.lab.stress.faults.peers import PEERS, PeerRow, peer_markdown, run_peers
from holmes.tools.cli.output import show
from holmes_comm.errors import UsageError


def names_of(text: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """Names from "kill,stop", from "all", or from "all,-kill": a name behind a minus is left out.

    Raises UsageError naming an unknown one and those there are, and where none is left.
    """
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    unknown = [word for word in words if word != "all" and word.removeprefix("-") not in known]
    if unknown:
        raise UsageError(f"there is no {what} {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    chosen = sorted(known) if "all" in words else [word for word in words if not word.startswith("-")]
    names = tuple(name for name in chosen if f"-{name}" not in words)
    if not names:
        raise UsageError(f'"{text}" leaves no {what}; name some, as {sorted(known)[0]}, or "all"')
    return names


def stress_with_faults(
    faults: str,
    peers: str,
    *,
    seconds: float,
    seed: int | None,
    episode: int | None,
    max_bytes: int,
    timeout_s: float | None,
    slack_s: float,
    save: Path | None,
    json_file: Path | None,
) -> int:
    """Runs the faults of groups, then those of elastic jobs, then the peers; prints the tables.

    Saves them as `save`.json and `save`.md. Returns the exit code: 0 where all was as it must be. KeyboardInterrupt
    ends it early, with the tables till then. Raises ValueError, TestbedError.
    """

    def say(line: str) -> None:
        typer.echo(line, err=True)

    _check_save(save)
    found: dict[str, Any] = {"machine": describe_machine()}
    markdown, code, is_interrupted = "", 0, False
    names = names_of(faults, [*FAULTS, *ELASTIC_FAULTS], "fault") if faults else ()
    elastic = [name for name in names if name in ELASTIC_FAULTS]
    of_groups = tuple(name for name in names if name in FAULTS)
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    elastic_s = seconds * len(elastic) / len(names) if names else 0.0
    if of_groups or (faults and not elastic):
        settings = FaultSettings(
            faults=of_groups,
            seconds=seconds - elastic_s,
            seed=seed,
            episode=episode,
            max_bytes=max_bytes,
            timeout_s=timeout_s or FaultSettings.timeout_s,
            slack_s=slack_s,
            connect_timeout_s=FaultSettings.connect_timeout_s - FaultSettings.slack_s + slack_s,
        )
        say(f"seed {settings.seed}; {len(settings.faults)} faults for {settings.seconds:.0f} s")
        result = run_faults(settings, say)
        found["holmes"], code, is_interrupted = result.summary(), result.exit_code, result.is_interrupted
        markdown += result.markdown()
    if elastic and not is_interrupted:
        say(f"seed {seed}; {len(elastic)} faults of elastic jobs for {elastic_s:.0f} s")
        jobs = run_elastic_faults(elastic, elastic_s, seed, episode, say)
        found["elastic"], code, is_interrupted = jobs.summary(), code or jobs.exit_code, jobs.is_interrupted
        markdown += "\n" + jobs.markdown()
    if peers and not is_interrupted:
        rows: list[PeerRow] = []
        try:
            rows.extend(run_peers(names_of(peers, PEERS, "peer"), say))
        except KeyboardInterrupt:
            is_interrupted = True
        found["peers"] = [row.to_dict() for row in rows]
        markdown += "\n" + peer_markdown(rows)
    found["interrupted"] = is_interrupted
    _save(save, found, markdown)
    show(json_file, found, lambda: typer.echo(markdown))
    return code


def stress_with_partitions(
    *,
    seconds: float,
    seed: int | None,
    episode: int | None,
    lease_s: float,
    save: Path | None,
    json_file: Path | None,
) -> int:
    """Splits the nodes and the store of an elastic job in every way; prints and saves as `stress_with_faults` does.

    Raises TestbedError.
    """

    def say(line: str) -> None:
        typer.echo(line, err=True)

    _check_save(save)
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    say(f"seed {seed}")
    result = run_partitions(seconds, seed, say, episode, lease_s)
    found = {"machine": describe_machine(), "partitions": result.summary(), "interrupted": result.is_interrupted}
    _save(save, found, result.markdown())
    show(json_file, found, lambda: typer.echo(result.markdown()))
    return result.exit_code


def _check_save(save: Path | None) -> None:
    if save is not None:
        files.make_folder(save.parent)
        for suffix in (".json", ".md"):
            files.check_writable(save.with_suffix(suffix))


def _save(save: Path | None, found: dict[str, Any], markdown: str) -> None:
    if save is not None:
        save.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        save.with_suffix(".md").write_text(markdown, encoding="utf-8")


def _without_save(words: list[str]) -> list[str]:
    """A path is of one machine."""
    at = words.index("--save") if "--save" in words else len(words)
    return words[:at] + words[at + 2 :]


def describe_machine() -> dict[str, Any]:
    """Processors, kernel, versions, load and date, for result files; no names of hosts."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "processors": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "holmes_comm": holmes_comm.__version__,
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "command": " ".join(["holmes", *_without_save(sys.argv[1:])]),
    }
