"""Two emulated nodes and one shaped link: runs a benchmark's ranks there, and writes what they found."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rank_jobs import results_of
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


def run_pair(script: str, rate_gbps: float, timeout_s: float, *, round_trip_ms: float = 0.0, nodes: int = 2) -> dict:
    """`script --rank` with this process's arguments on all nodes; what rank 0 told. Raises as `results_of`."""
    from holmes.lab.testbed import Testbed

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as spec:
        spec.write(SPEC.format(rate_gbps, round_trip_ms / 2, nodes))
        spec.flush()
        testbed = Testbed(Path(spec.name))
    outcome = testbed.run([sys.executable, script, "--rank", *sys.argv[1:]], timeout_s=timeout_s)
    return results_of(outcome)[0]


def write_pair_results(
    script: str, name: str, ranks: str, settings: dict, text: str, result: dict, *, nodes: int = 2
) -> None:
    """results/NAME.json and NAME.md. `ranks`: what the nodes are, for the heading; `settings` hold rate_gbps."""
    heading = f"{name.capitalize()}\n\nEmulated link of {settings['rate_gbps']:g} Gbit/s, {ranks}"
    notes = f"all numbers and versions in {name}.json."
    write_results(script, name, heading=heading, notes=notes, ranks=nodes, settings=settings, text=text, result=result)
