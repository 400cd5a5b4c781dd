"""How long an elastic job takes to go on after losing nodes, and whether its losses are those of an unbroken one.

    python benchmarks/bench_recovery.py            # all; writes results/recovery.json and results/recovery.md
    python benchmarks/bench_recovery.py --only first-rank cut-off

Four nodes in two clusters of the testbed, one rank each, and a fifth that serves the store. Each scenario loses nodes
and gives them back; then the same steps are done by fresh processes of jobs that are stopped and started as planned, on
the nodes of each generation in turn, and the losses are compared. detected: from the fault to the first rank that says
so; agreed: until the next generation is decided; first step: until it has done one. Exit code 1 where a loss differs by
more than 1e-5 of it, or a rank that lived through has other descriptors at the end than before the fault.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_job import ElasticJob, ElasticNodes

from holmes.tools.bench import tables

RESULTS = Path(__file__).parent / "results"
NODES = ["a0", "a1", "b0", "b1"]
STEPS, FAULT_STEP, HOLD_STEP = 40, 12, 27
MODEL = {"layers": 6, "width": 64, "heads": 2, "sequence": 16, "global_batch": 12, "steps": STEPS}
MOST_DIFFERENCE = 1e-5
NOTES = """
Four nodes (two "InfiniBand", two "RoCE") on one machine, one rank each; nodes are network namespaces, faults are real:
SIGKILL, SIGSTOP, links taken down. Times are from the fault: until the first survivor says that its generation has
failed, until the next one is decided, until that has done its first step. Of these, 3 s are waited, while they agree,
until the lease of whoever is missing is over (1.5 `Rules.lease_s`, here 2), and 3 s more until a rank that neither
works nor ends is given up (`dead_after_s`, here 3). "steps again": those since the last checkpoint, one every 5 steps.
"largest difference": of all steps' losses from those of fresh processes which are stopped and started as planned, at
the same steps on the same nodes.
"""


class Scenario:
    """A job, what is done to it, and what came of it."""

    def __init__(self, nodes: ElasticNodes, folder: Path, port: int, survivors_generation: int, **options: Any):
        self.nodes = nodes
        self.go = folder / "go"
        hold = {str(survivors_generation): {"step": HOLD_STEP, "file": str(self.go)}}
        self.generation = survivors_generation
        self.job = ElasticJob(nodes, NODES, port, MODEL, checkpoints=str(folder / "elastic"), hold=hold, **options)
        self.fault_s = 0.0
        self.job.start(*NODES)
        self.job.wait_for_step(FAULT_STEP, 1)

    def fault(self) -> None:
        """Now."""
        self.fault_s = time.monotonic()

    def give_back(self, *nodes: str, resumed: tuple[str, ...] = ()) -> None:
        """Starts nodes again, or lets stopped ones go on; the survivors go on when all of them wait to be let in."""
        self.job.wait_for_step(HOLD_STEP, self.generation)
        for node in resumed:
            self.job.kill(node, signal="CONT")
        self.job.start(*nodes)
        for node in (*nodes, *resumed):
            self.job.wait("waits to be let in", node)
        self.go.touch()
        self.job.finish()


def one_node(scenario: Scenario) -> None:
    """One node is killed"""
    scenario.fault()
    scenario.job.kill("a1")
    scenario.give_back("a1")


def first_rank(scenario: Scenario) -> None:
    """Rank 0's node is killed"""
    scenario.fault()
    scenario.job.kill("a0")
    scenario.give_back("a0")


def two_nodes(scenario: Scenario) -> None:
    """Two nodes are killed at once, one of each cluster"""
    scenario.fault()
    scenario.job.kill("a1", "b1")
    scenario.give_back("a1", "b1")


def stopped(scenario: Scenario) -> None:
    """A node is stopped (SIGSTOP), and goes on later"""
    scenario.fault()
    scenario.job.kill("a1", signal="STOP")
    scenario.give_back(resumed=("a1",))


def stopped_in_agreement(scenario: Scenario) -> None:
    """One is killed; another is stopped while they agree"""
    scenario.fault()
    scenario.job.kill("b1")
    scenario.job.wait("generation 1 failed")
    scenario.job.kill("a1", signal="STOP")
    scenario.give_back("b1", resumed=("a1",))


def killed_in_rebuild(scenario: Scenario) -> None:
    """One is killed; another is killed while they rebuild"""
    scenario.fault()
    scenario.job.kill("b1")
    scenario.job.wait("fault", "a1")
    scenario.job.wait_for_end("a1")
    scenario.give_back("b1", "a1")


def stopped_in_rebuild(scenario: Scenario) -> None:
    """One is killed; another is stopped while they rebuild"""
    scenario.fault()
    scenario.job.kill("b1")
    scenario.job.wait("fault", "a1")
    scenario.give_back("b1", resumed=("a1",))


def cut_off(scenario: Scenario) -> None:
    """All links of a node are cut; it ends by itself"""
    scenario.fault()
    for nic in ("ib0", "eth0"):
        scenario.nodes.session.set_link("a1", nic, up=False)
    scenario.job.wait_for_step(HOLD_STEP, 2)
    if scenario.job.wait_for_end("a1") == 0:
        raise RuntimeError("the node that was cut off says that all is well")
    for nic in ("ib0", "eth0"):
        scenario.nodes.session.set_link("a1", nic, up=True)
    scenario.give_back("a1")


SCENARIOS: dict[str, tuple[Callable[[Scenario], None], int, dict[str, Any]]] = {
    "one-node": (one_node, 2, {}),
    "first-rank": (first_rank, 2, {}),
    "two-nodes": (two_nodes, 2, {}),
    "stopped": (stopped, 2, {}),
    "stopped-in-agreement": (stopped_in_agreement, 2, {}),
    "killed-in-rebuild": (killed_in_rebuild, 3, {"plan": 2, "signal": "SIGKILL"}),
    "stopped-in-rebuild": (stopped_in_rebuild, 3, {"plan": 2, "signal": "SIGSTOP"}),
    "cut-off": (cut_off, 2, {}),
}


def phases_of(job: ElasticJob) -> list[tuple[list[str], int]]:
    """(nodes, first step not done) of each generation that did steps which count."""
    members = job.members()
    starts: dict[int, int] = {}
    for entry in job.steps:
        starts.setdefault(entry["generation"], entry["step"])
    numbers = sorted(starts)
    ends = [*(starts[number] for number in numbers[1:]), STEPS]
    return [(members[number], end) for number, end in zip(numbers, ends, strict=True)]


def planned(nodes: ElasticNodes, folder: Path, port: int, phases: list[tuple[list[str], int]]) -> dict[int, float]:
    """The losses of fresh jobs, one for each phase, each from the checkpoint of the one before."""
    losses: dict[int, float] = {}
    for index, (members, until) in enumerate(phases):
        options = {"until": until, "every": STEPS, "ranks": len(members), "checkpoints": str(folder / "planned")}
        job = ElasticJob(nodes, NODES, port + index, MODEL, **options)
        job.start(*members)
        job.finish()
        losses |= job.losses()
    return losses


def measure(nodes: ElasticNodes, name: str, folder: Path, port: int) -> dict[str, Any]:
    started_s = time.monotonic()
    act, generation, fault = SCENARIOS[name]
    hurts = {"fault": {"a1": {**fault, "once": str(folder / "hurt")}}} if fault else {}
    scenario = Scenario(nodes, folder, port, generation, **hurts)
    job = scenario.job
    try:
        act(scenario)
    finally:
        (folder / "lines").write_text("".join(f"{at - started_s:8.3f} {node} {line}\n" for at, node, line in job.lines))
    detected_s = min(at for at, _, line in job.lines if line.startswith("generation 1 failed"))
    agreed_s = min(at for at, _, line in job.lines if line.startswith(f"generation {generation}: rank"))
    first_s = min(at for at, _, line in job.lines if f'"generation": {generation}, ' in line)
    phases = phases_of(job)
    expected = planned(nodes, folder, port + 1, phases)
    losses = job.losses()
    difference = max(abs(losses[step] - expected[step]) / abs(expected[step]) for step in range(STEPS))
    done_twice = len(job.steps) - STEPS
    return {
        "scenario": name,
        "what": (act.__doc__ or "").strip(),
        "ranks": [len(members) for members, _ in phases],
        "until": [until for _, until in phases],
        "detected_s": detected_s - scenario.fault_s,
        "agreed_s": agreed_s - scenario.fault_s,
        "first_step_s": first_s - scenario.fault_s,
        "steps_done_twice": done_twice,
        "largest_difference": difference,
        "equal_losses": sum(losses[step] == expected[step] for step in range(STEPS)),
        "descriptors": job.kept(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| what is lost | ranks, until step | detected | agreed | first step | steps again | largest difference |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        phases = ", ".join(f"{ranks} to {until}" for ranks, until in zip(row["ranks"], row["until"], strict=True))
        times = " | ".join(f"{row[key]:.2f} s" for key in ("detected_s", "agreed_s", "first_step_s"))
        equal = f"{row['largest_difference']:.0e}" if row["largest_difference"] else f"none ({STEPS} equal)"
        lines.append(f"| {row['what']} | {phases} | {times} | {row['steps_done_twice']} | {equal} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True, help="results/recovery.*")
    parser.add_argument("--keep", type=Path, help="folder for checkpoints and output; default: a temporary one")
    arguments = parser.parse_args()
    rows = []
    # The folder goes last: what is killed at the end of the session may still write to it.
    with folder_of(arguments.keep) as folder, ElasticNodes(Path(folder)) as nodes:
        for index, name in enumerate(arguments.only):
            print(f"{name} ...", file=sys.stderr, flush=True)
            (own := Path(folder) / name).mkdir()
            rows.append(measure(nodes, name, own, 29400 + 20 * index))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(table(rows))
    if arguments.write:
        write(rows)
    kept = [row["scenario"] for row in rows for before, after in row["descriptors"].values() if after != before]
    wrong = [row["scenario"] for row in rows if row["largest_difference"] > MOST_DIFFERENCE]
    if kept or wrong:
        sys.exit(f"descriptors were kept in {sorted(set(kept))}; losses differ in {wrong}")


def folder_of(keep: Path | None) -> contextlib.AbstractContextManager[str]:
    return tempfile.TemporaryDirectory() if keep is None else contextlib.nullcontext(str(keep))


def write(rows: list[dict[str, Any]]) -> None:
    """Rows of scenarios that did not run now stay as they were."""
    path = RESULTS / "recovery.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    by_name = {row["scenario"]: row for row in [*before, *rows]}
    merged = [by_name[name] for name in SCENARIOS if name in by_name]
    facts = tables.facts("python benchmarks/bench_recovery.py", MODEL)
    path.write_text(json.dumps({**facts, "rows": merged}, indent=1) + "\n")
    hardware = ", ".join(f"{key} {value}" for key, value in {**facts["hardware"], **facts["versions"]}.items())
    text = f"# Recovery\n\n`{facts['command']}` on {facts['date']}; {hardware}.\n\n{table(merged)}\n"
    (RESULTS / "recovery.md").write_text(text + NOTES)


if __name__ == "__main__":
    main()
