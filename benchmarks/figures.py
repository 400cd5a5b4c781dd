"""The figures that Holmes promises, from one command: `python benchmarks/figures.py [--quick] [--only NAME ...]`.

Executes the runs of figures.yaml, then `holmes bench --matrix`, and writes results/NAME.json, matrix.json, matrix.png
and, from all such files, results/figures.md.
Exits with 1 where a goal of an executed run is missed.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figure_runs import UPPER_BOUNDS, Goal, Run, execute_matrix, load_runs

from holmes.tools.bench import parse_bytes
from holmes.tools.bench.matrix import Cell, lost_cells

RESULTS = Path(__file__).parent / "results"
QUICK_S, QUICK_ROUNDS = 0.3, 3
MATRIX, MATRIX_SHARE = "matrix", 10  # it has some ten times as many cells


def own_rows(document: dict[str, Any], goal: Goal) -> Iterator[dict[str, Any]]:
    """Yields Holmes's rows of the goal's operation and size."""
    for row in document["rows"]:
        if row["peer"].startswith("holmes") and row["operation"] == goal.operation:
            asked = parse_bytes(goal.size)
            # A size that the ranks cannot divide evenly is rounded.
            if asked * 0.9 < row["size_bytes"] <= asked:
                yield row


def judge(run: Run, document: dict[str, Any]) -> list[tuple[Goal, dict[str, Any]]]:
    """Returns every goal with the row it is about. Raises ValueError where the document lacks it."""
    found = []
    for goal in run.each_goal():
        rows = list(own_rows(document, goal))
        if not rows:
            raise ValueError(f"{run.name}: no row of {goal.operation} at {goal.size}; run it again")
        found += [(goal, row) for row in rows]
    return found


def section(run: Run, document: dict[str, Any]) -> str:
    """Returns the run's part of figures.md."""
    lines = [
        f"## {run.title}",
        "",
        f"{document['date']}: `{document['command']}`",
        "",
        "| operation | size | time (us) | busbw (GB/s) | cores | foreign | against | value | goal | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for goal, row in judge(run, document):
        at_most = goal.reference in UPPER_BOUNDS
        bound = f"<= {goal.bound:g}" if at_most else f"{goal.bound:g}"
        lines.append(
            f"| {goal.operation} | {goal.size} | {row['time_us']:.1f} | {row['bus_gb_per_s']:.3f} | {row['cores']:.2f} "
            f"| {'-' if row.get('foreign_cores') is None else format(row['foreign_cores'], '.2f')} "
            f"| {goal.reference} | {goal.value(row):.3g} | {bound} | {'met' if goal.met(row) else 'MISSED'} |"
        )
    return "\n".join([*lines, ""])


def report(documents: list[tuple[Run, dict[str, Any]]]) -> str:
    """Returns figures.md."""
    judged = [(goal, row) for run, document in documents for goal, row in judge(run, document)]
    met = sum(goal.met(row) for goal, row in judged)
    newest = max((document for _, document in documents), key=lambda document: document["date"])
    hardware, versions = newest["hardware"], newest["versions"]
    head = [
        "# What Holmes promises, and what it reaches",
        "",
        "Made by `python benchmarks/figures.py` from the JSON files beside it; its goals are in `figures.yaml`.",
        "float32, sum; value is how many times faster than what is named, unless it is a share of iperf3 or a bound.",
        "cores: kept busy by all ranks together; foreign: by other processes meanwhile, which spoil a figure.",
        f"Hardware: {hardware['processor']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB.",
        f"Kernel {hardware['kernel']}; {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        "All ranks ran on this one machine; nodes and links were emulated by `holmes testbed`.",
        "",
        f"{met} of {len(judged)} goals met.",
        "",
    ]
    return "\n".join([*head, *(section(run, document) for run, document in documents)])


def matrix_section(document: dict[str, Any], picture: str = f"{MATRIX}.png") -> str:
    """Returns the matrix's part of figures.md: the cells that a peer won, from the file that `holmes bench` wrote."""
    cells = [Cell(**cell) for cell in document["cells"]]
    lost = lost_cells(cells)
    layouts = ", ".join(dict.fromkeys(cell.layout for cell in cells))
    lines = [
        f"## Every operation and size against the best of all: {layouts}",
        "",
        f"{document['date']}: `{document['command']}`. Of {len(cells)} cells {len(lost)} were lost by more than "
        f"{document['noise']:.0%} in two measurements ([picture]({picture})).",
        *(f"Not measured: {failure}." for failure in document["failures"]),
        "",
        "| layout | operation | size (bytes) | time (us) | fastest | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {cell.layout} | {cell.operation} | {cell.size_bytes} | {cell.time_us:.1f} | {cell.best_peer} "
        f"| {cell.ratio:.2f} |"
        for cell in lost
    ]
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    runs = load_runs()
    parser.add_argument("--only", choices=[*(run.name for run in runs), MATRIX], action="append", help="only this run")
    parser.add_argument("--quick", action="store_true", help="short: for a first look, not for a result")
    parser.add_argument("--seconds", type=float, default=2.0, help="timed work for each peer, operation and size")
    parser.add_argument("--rounds", type=int, default=7, help="how often peers take turns")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--report", action="store_true", help="run nothing, only write figures.md again")
    arguments = parser.parse_args()
    seconds, rounds = (QUICK_S, QUICK_ROUNDS) if arguments.quick else (arguments.seconds, arguments.rounds)
    arguments.results.mkdir(exist_ok=True, parents=True)
    missed = 0
    for run in runs:
        if arguments.report or (arguments.only and run.name not in arguments.only):
            continue
        document = run.execute(arguments.results / f"{run.name}.json", seconds, rounds)
        print(section(run, document), flush=True)
        missed += sum(not goal.met(row) for goal, row in judge(run, document))
    matrix = arguments.results / f"{MATRIX}.json"
    if not arguments.report and (not arguments.only or MATRIX in arguments.only):
        execute_matrix(matrix, seconds / MATRIX_SHARE, rounds)
    paths = [(run, arguments.results / f"{run.name}.json") for run in runs]
    text = report([(run, json.loads(path.read_text())) for run, path in paths if path.exists()])
    # Others, matrix-NAME.json, are of another environment: on emulated links Open MPI is version 4.
    for path in [matrix, *sorted(arguments.results.glob(f"{MATRIX}-*.json"))]:
        if path.exists():
            text += "\n" + matrix_section(json.loads(path.read_text()), path.with_suffix(".png").name)
    (arguments.results / "figures.md").write_text(text)
    print(f"{missed} goals missed; {arguments.results / 'figures.md'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
