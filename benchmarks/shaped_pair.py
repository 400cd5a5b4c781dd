"""Two emulated nodes and one shaped link: runs a benchmark's ranks there, and writes what they found."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from holmes.tools.bench import tables

RESULTS = Path(__file__).parent / "results"
SPEC = """description: two nodes and one shaped link
networks:
  eth: {{class: ethernet, rate_gbps: {}}}
clusters:
  a:
    nodes: 2
    nics:
      - {{name: eth0, network: eth}}
"""


def run_pair(script: str, rate_gbps: float, timeout_s: float) -> dict:
    """`script --rank` with this process's arguments on both nodes; what rank 0 printed as "RESULT {...}".

    Raises SystemExit with all output where a rank fails or none says its result.
    """
    from holmes.lab.testbed import Testbed

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as spec:
        spec.write(SPEC.format(rate_gbps))
        spec.flush()
        testbed = Testbed(Path(spec.name))
    outcome = testbed.run([sys.executable, script, "--rank", *sys.argv[1:]], timeout_s=timeout_s)
    lines = [line for output in outcome.outputs.values() for line in output]
    found = [line for line in lines if line.startswith("RESULT ")]
    if outcome.returncode != 0 or not found:
        raise SystemExit("\n".join(lines))
    return json.loads(found[0].removeprefix("RESULT "))


def write_results(script: str, name: str, ranks: str, settings: dict, text: str, result: dict) -> None:
    """results/NAME.json and NAME.md. `ranks`: what the two are, for the heading; `settings` hold rate_gbps."""
    command = " ".join([f"python benchmarks/{Path(script).name}", *sys.argv[1:]])
    document = tables.document(command, {**settings, "emulated": True}, 2, {}, []) | result
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    heading = (
        f"# {name.capitalize()}\n\nEmulated link of {settings['rate_gbps']:g} Gbit/s, {ranks}, {os.cpu_count()} cores; "
        f"`{command}`; {time.strftime('%Y-%m-%d')}; all numbers and versions in {name}.json.\n\n"
    )
    (RESULTS / f"{name}.md").write_text(heading + text + "\n")
