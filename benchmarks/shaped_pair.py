"""Two emulated nodes and one shaped link: runs a benchmark's ranks there, and writes what they found."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from result_files import write_results

SPEC = """description: nodes on one shaped network
networks:
  eth: {{class: ethernet, rate_gbps: {}, delay_ms: {}}}
clusters:
  a:
    nodes: {}
    nics:
      - {{name: eth0, network: eth}}
"""


def run_pair(
    script: str, rate_gbps: float, timeout_s: float, *, round_trip_ms: float = 0.0, nodes: int = 2, more: tuple = ()
) -> dict:
    """`script --rank` with this process's arguments and `more` on all nodes; what rank 0 printed as "RESULT {...}".

    Raises SystemExit with all output where a rank fails or none says its result.
    """
    from holmes.lab.testbed import Testbed

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as spec:
        spec.write(SPEC.format(rate_gbps, round_trip_ms / 2, nodes))
        spec.flush()
        testbed = Testbed(Path(spec.name))
    outcome = testbed.run([sys.executable, script, "--rank", *sys.argv[1:], *more], timeout_s=timeout_s)
    lines = [line for output in outcome.outputs.values() for line in output]
    found = [line for line in lines if line.startswith("RESULT ")]
    if outcome.returncode != 0 or not found:
        raise SystemExit("\n".join(lines))
    return json.loads(found[0].removeprefix("RESULT "))


def write_pair_results(script: str, name: str, ranks: str, settings: dict, text: str, result: dict) -> None:
    """results/NAME.json and NAME.md. `ranks`: what the two are, for the heading; `settings` hold rate_gbps."""
    heading = f"{name.capitalize()}\n\nEmulated link of {settings['rate_gbps']:g} Gbit/s, {ranks}"
    notes = f"all numbers and versions in {name}.json."
    write_results(script, name, heading=heading, notes=notes, ranks=2, settings=settings, text=text, result=result)
