"""The figures that Holmes promises, from one command: `python benchmarks/figures.py [--seconds 5]`.

64 MiB over loopback TCP with 4 ranks beside Gloo, and over emulated 1 Gbit/s links as a share of the line. Writes
results/*.json and results/figures.md; exits with 1 where a goal is missed.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
OPERATIONS = ["reduce_scatter", "all_gather", "all_reduce"]
LINE_GB_PER_S = 1.0 / 8  # the testbed's links: 1 Gbit/s
TIMES_GLOO = {"reduce_scatter": 5.0, "all_gather": 4.0, "all_reduce": 2.0}
SHARE_OF_LINE = dict.fromkeys(OPERATIONS, 0.9)


@dataclass(frozen=True)
class Run:
    """One call of `holmes bench`."""

    name: str
    title: str
    options: list[str]
    goals: dict[str, float]
    testbed: list[str] | None = None  # options of `holmes testbed run`

    def value(self, row: dict) -> float:
        """Returns the number that the goal is about."""
        return row["bus_gb_per_s"] / LINE_GB_PER_S if self.testbed else row["ratios"]["gloo"]

    def execute(self, seconds: float) -> dict:
        """Runs it and returns the JSON it wrote."""
        path = RESULTS / f"{self.name}.json"
        bench = ["holmes", "bench", *OPERATIONS, "-b", "64M", "-e", "64M", "--seconds", str(seconds), *self.options]
        command = [*(["holmes", "testbed", "run", *self.testbed, "--"] if self.testbed else []), *bench]
        print("$", " ".join(command), flush=True)
        environment = {**os.environ, "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])}
        subprocess.run([*command, "--json", os.path.relpath(path)], check=True, env=environment)
        return json.loads(path.read_text())


LOOPBACK = ["--ranks", "4", "--transport", "tcp", "--nics", "class:loopback"]
RUNS = [
    Run("loopback-api", "loopback TCP, 4 ranks, own API, times Gloo", LOOPBACK, TIMES_GLOO),
    Run("loopback-torch", "loopback TCP, 4 ranks, through torch, times Gloo", [*LOOPBACK, "--through", "torch"], {}),
    Run("shm-api", "shared memory, 4 ranks, own API, times Gloo", ["--ranks", "4", "--transport", "shm"], {}),
    Run("link-2", "2 nodes, 1 Gbit/s, share of the line", ["--peers", "none"], SHARE_OF_LINE, ["--spec", "pair"]),
    Run(
        "link-4",
        "4 nodes, 1 Gbit/s InfiniBand-like, share of the line",
        ["--peers", "none", "--nics", "class:infiniband"],
        SHARE_OF_LINE,
        ["--spec", "one-cluster"],
    ),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="timed work for each peer and operation")
    parser.add_argument("--only", choices=[run.name for run in RUNS], action="append", help="only this run")
    arguments = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    lines = ["| run | operation | time (ms) | busbw (GB/s) | value | goal |", "| --- | --- | --- | --- | --- | --- |"]
    missed = 0
    for run in RUNS:
        if arguments.only and run.name not in arguments.only:
            continue
        result = run.execute(arguments.seconds)
        for row in result["rows"]:
            if row["peer"] == "gloo":
                continue
            value, goal = run.value(row), run.goals.get(row["operation"])
            missed += row["wrong_elements"] > 0 or (goal is not None and value < goal)
            verdict = "-" if goal is None else f"{goal} {'met' if value >= goal else 'MISSED'}"
            lines.append(
                f"| {run.title} | {row['operation']} | {row['time_us'] / 1e3:.1f} | {row['bus_gb_per_s']:.3f} "
                f"| {value:.2f} | {verdict} |"
            )
    hardware, versions = result["hardware"], result["versions"]
    command = " ".join(["python benchmarks/figures.py", *sys.argv[1:]])
    facts = [
        f"Date: {result['date']}. Command: `{command}`; the runs' own commands are in their JSON.",
        f"Hardware: {hardware['processor']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB.",
        f"Kernel {hardware['kernel']}; {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        "All ranks ran on this one machine; the nodes and links of the link runs were emulated by `holmes testbed`.",
    ]
    text = "\n".join(["# 64 MiB, float32, sum", "", *facts, "", *lines, ""])
    (RESULTS / "figures.md").write_text(text)
    print(text)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
