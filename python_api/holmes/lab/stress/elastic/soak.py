"""Elastic jobs with one fault each, until time is over: a line for each, then a table."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holmes.lab.stress.elastic.catalogue import ELASTIC_FAULTS

_SHOWN = 3  # problems of an episode


@dataclass
class ElasticResult:
    """By fault: how many jobs, how many of them as unbroken. `problems`: by episode. `left_out`: and why.
    `is_interrupted`: Ctrl-C or SIGTERM came before its time was over."""

    seed: int
    tried: dict[str, int] = field(default_factory=dict)
    right: dict[str, int] = field(default_factory=dict)
    problems: dict[int, list[str]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    is_interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """0 where every job went as it must."""
        return int(bool(self.problems or not self.tried))

    def summary(self) -> dict[str, Any]:
        """Ready for JSON."""
        rows = {name: {"injected": count, "right": self.right.get(name, 0)} for name, count in self.tried.items()}
        problems = {str(number): lines for number, lines in self.problems.items()}
        return {"seed": self.seed, "faults": rows, "problems": problems, "left_out": self.left_out}

    def markdown(self) -> str:
        """The table."""
        lines = [f"{sum(self.tried.values())} elastic jobs, seed {self.seed}.", ""]
        lines += ["| fault | jobs | as unbroken |", "| --- | ---: | ---: |"]
        for name, count in sorted(self.tried.items()):
            lines.append(f"| {name}: {ELASTIC_FAULTS[name][0]} | {count} | {self.right.get(name, 0)} |")
        lines += [f"- episode {number}: {text}" for number, texts in self.problems.items() for text in texts[:_SHOWN]]
        return "\n".join([*lines, "", f"Left out: {self.left_out or 'nothing'}."]) + "\n"


def run_elastic_faults(
    names: Sequence[str], seconds: float, seed: int, episode: int | None, say: Callable[[str], None]
) -> ElasticResult:
    """One job after the other, each fault once before any comes again; `say` gets a line for each. KeyboardInterrupt
    ends it early, with the result till then."""
    result = ElasticResult(seed)
    try:
        _run_all(names, seconds, seed, episode, result, say)
    except KeyboardInterrupt:
        result.is_interrupted = True
    return result


def _run_all(
    names: Sequence[str],
    seconds: float,
    seed: int,
    episode: int | None,
    result: ElasticResult,
    say: Callable[[str], None],
) -> None:
    order = sorted(names)
    random.Random(seed).shuffle(order)
    began_s = time.monotonic()
    number = 0 if episode is None else episode
    while order and (not result.tried or (episode is None and time.monotonic() - began_s < seconds)):
        name = order[number % len(order)]
        folder = Path(tempfile.mkdtemp(prefix="holmes-elastic-"))
        try:
            what, problems = ELASTIC_FAULTS[name][1](folder, random.Random(f"{seed}/{number}"))
        except OSError as error:  # no compiler
            result.left_out[name] = str(error)
            order.remove(name)
            continue
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        result.tried[name] = result.tried.get(name, 0) + 1
        result.right[name] = result.right.get(name, 0) + (not problems)
        say(
            f"[{time.monotonic() - began_s:4.0f} of {seconds:.0f} s] job {number} {'WRONG' if problems else 'ok'}: "
            f"{name}: {what}"
        )
        for problem in problems[:_SHOWN]:
            say(f"  PROBLEM: {problem}")
        if problems:
            result.problems[number] = problems
            say(f"  again: holmes stress --testbed --faults {','.join(sorted(names))} --seed {seed} --episode {number}")
        number += 1
