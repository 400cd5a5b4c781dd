"""Is `holmes plan` right? `python benchmarks/exhaustive_search.py`: random small cases, every choice simulated.

For each case: that nothing is more than 1 % faster than what the search found, and that every loss it states is within
1 % of planning again with that choice pinned, and of the best of all choices that have it. Writes
results/exhaustive-search.json; exits with 1 where a case misses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

from holmes.cluster.topology import Topology
from holmes.planning.model.gpt import Transformer
from holmes.planning.search import Wanted, search
from holmes.planning.search.candidate import Candidate, evaluate
from holmes.planning.search.layout import Layout
from holmes.planning.search.search import SearchResult
from holmes.tools.bench import tables

HERE = Path(__file__).parent
GOAL = 0.01
ROUNDING = 0.0005  # of what is printed


def topology(**second: object) -> Topology:
    """Two clusters of two hosts with 4 GPUs each, joined by Ethernet; `second`: what differs in the second one."""

    def host(name: str, nic_class: str, gbps: float, gpu: str) -> dict[str, Any]:
        ports = [
            {"name": "fast0", "nic_class": nic_class, "subnet": name, "speed_gbps": gbps},
            {"name": "eth0", "nic_class": "ethernet", "subnet": "all", "speed_gbps": 25},
        ]
        return {"name": f"{name}{{}}", "count": 2, "ranks_per_host": 4, "gpu": gpu, "ports": ports}

    options = {"name": "b", "nic_class": "roce_v2", "gbps": 100, "gpu": "A100-80GB"} | second
    hosts = [host("a", "infiniband", 200, "A100-80GB"), host(**options)]  # type: ignore[arg-type]
    return Topology.from_dict({"kind": "holmes topology", "version": 2, "hosts": hosts})


def random_case(seed: int) -> tuple[Topology, Transformer, int]:
    """Two unlike clusters, networks from slow to fast, a small model, and the samples of a step."""
    draw = random.Random(seed)
    second = {"gbps": draw.choice([1, 10, 100]), "gpu": draw.choice(["A100-80GB", "H100", "A100-40GB"])}
    machines = topology(**second).to_dict()
    ranks = draw.choice([1, 2])
    ethernet = draw.choice([0.1, 1, 25])
    for host in machines["hosts"]:
        host["ranks_per_host"] = ranks
        host["ports"][-1]["speed_gbps"] = ethernet
    hidden = draw.choice([512, 2048])
    model = Transformer(draw.choice([8, 12]), hidden, 8, sequence=draw.choice([512, 2048]), vocabulary=32000)
    return Topology.from_dict(machines), model, draw.choice([16, 32])


def every_candidate(found: SearchResult, model: Transformer, batch: int) -> list[Candidate]:
    """All choices that fit into memory, simulated."""
    simulated = {candidate.choice: candidate for candidate in found.candidates}
    every = []
    for choice, _ in found.estimates:
        with contextlib.suppress(ValueError):  # memory has room for parts of layers only
            known = simulated.get(choice)
            every.append(known or evaluate(Layout.of(found.machines, model, choice, batch)))
    return every


def stated_losses(found: SearchResult) -> list[tuple[str, str, float]]:
    """(decision, other value, share lost) of every alternative that is printed."""
    return [
        (line.split()[0].replace("-", "_"), value, float(percent) / 100)
        for line in found.reasons()
        if "the best with another" in line
        for value, percent in re.findall(r"[:,] (\S+) \+?(-?[\d.]+) %", line)
    ]


def compare(seed: int) -> dict[str, Any]:
    """One case: shares by which the search's answer, and its worst statement, are off."""
    machines, model, batch = random_case(seed)
    found = search(machines, model, batch)
    best_s = found.best.step_s
    every = every_candidate(found, model, batch)
    off_pinned, off_best = [0.0], [0.0]
    losses = stated_losses(found)
    for name, value, share in losses:
        wanted = Wanted(**{name: value if name in ("schedule", "recomputation") else int(value)})  # type: ignore[arg-type]
        told_s = best_s * (1 + share)
        off_pinned.append(abs(told_s / search(machines, model, batch, wanted=wanted).best.step_s - 1) - ROUNDING)
        own_s = min(one.step_s for one in every if str(getattr(one.choice, name)) == value)
        off_best.append(abs(told_s / own_s - 1) - ROUNDING)
    return {
        "seed": seed,
        "choices": len(every),
        "alternatives": len(losses),
        "slower_than_best": best_s / min(one.step_s for one in every) - 1,
        "off_pinned": max(off_pinned),
        "off_best": max(off_best),
    }


def main() -> int:
    """Runs the cases; returns 0 where all are within the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="The first seed.")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "exhaustive-search.json")
    arguments = parser.parse_args()
    began_s, rows = time.perf_counter(), []
    for seed in range(arguments.first, arguments.first + arguments.cases):
        row = compare(seed)
        rows.append(row)
        missed = [key for key in ("slower_than_best", "off_pinned", "off_best") if row[key] > GOAL]
        if missed or seed % 20 == 19:
            print(f"seed {seed}: {', '.join(missed) or 'within'} {row}", flush=True)
    worst = {key: max(row[key] for row in rows) for key in ("slower_than_best", "off_pinned", "off_best")}
    met = all(value <= GOAL for value in worst.values())
    settings = {"cases": arguments.cases, "first": arguments.first, "goal": GOAL}
    document = tables.facts("python benchmarks/exhaustive_search.py", settings)
    document |= {"goal_met": met, "worst": worst, "seconds": round(time.perf_counter() - began_s), "rows": rows}
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{len(rows)} cases, worst {worst}: the goal is {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
