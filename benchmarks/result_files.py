"""What a benchmark on emulated nodes found, as files."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from holmes.tools.bench import tables

RESULTS = Path(__file__).parent / "results"


def write_results(
    script: str, name: str, *, heading: str, notes: str, ranks: int, settings: dict, text: str, result: dict[str, Any]
) -> None:
    """results/NAME.json, with all of `result`, and NAME.md.

    `heading`: its title, and where it ran in words; `notes`: what else to know of the table in `text`.
    """
    command = " ".join([f"python benchmarks/{Path(script).name}", *sys.argv[1:]])
    document = tables.document(command, {**settings, "emulated": True}, ranks, {}, []) | result
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    where = f"{heading}, {os.cpu_count()} cores; `{command}`; {time.strftime('%Y-%m-%d')}; {notes}"
    (RESULTS / f"{name}.md").write_text(f"# {where}\n\n{text}\n")
