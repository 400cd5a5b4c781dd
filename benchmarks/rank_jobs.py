"""Benchmarks that start themselves again as the ranks of a job."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any


def parse_or_work(parser: argparse.ArgumentParser, work: Callable[[Any], object]) -> argparse.Namespace:
    """The benchmark's arguments. A process that was started as a rank, with `--rank JOB` (JSON), works and ends."""
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        work(json.loads(arguments.rank))
        sys.exit()
    return arguments
