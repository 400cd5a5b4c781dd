"""Benchmarks that start themselves again as the ranks of a job."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

_RESULT = "RESULT "


def parse_or_work(parser: argparse.ArgumentParser, work: Callable[[Any], object]) -> argparse.Namespace:
    """The benchmark's arguments. A process that was started as a rank, with `--rank JOB` (JSON), works and ends."""
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        work(json.loads(arguments.rank))
        sys.exit()
    return arguments


def tell_result(result: Any) -> None:
    """On a rank: the one who started the job gets it from `results_of`."""
    print(_RESULT + json.dumps(result), flush=True)


def results_of(outcome: Any) -> list[Any]:
    """What the ranks of a testbed's job told. Raises SystemExit with all output where one failed or none did."""
    lines = [line for output in outcome.outputs.values() for line in output]
    found = [json.loads(line.removeprefix(_RESULT)) for line in lines if line.startswith(_RESULT)]
    if outcome.returncode != 0 or not found:
        raise SystemExit("\n".join(lines))
    return found
