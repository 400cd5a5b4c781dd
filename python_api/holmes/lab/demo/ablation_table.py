"""The ablation's table: compares the rows, checks the goals, writes JSON, markdown and a picture."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from holmes.lab.demo.ablation import Ablation, Measured
from holmes.lab.demo.comparison import LOSS_TOLERANCE, Check, largest_difference
from holmes.lab.demo.run_demo import emulated
from holmes.tools.bench.tables import facts

AHEAD_OF_MEGATRON = 1.38
BEHIND_ONE_CLUSTER = 0.15
COLUMNS = ("run", "layers", "step", "slowest to fastest round", "against Holmes", "foreign cores")


def step_s(measured: Measured) -> float:
    """Median over rounds of a round's median step."""
    return statistics.median(run.step_s() for run in measured.runs)


def ratio(measured: Measured, reference: Measured) -> float:
    """How many times as long a step takes as the reference's: median over rounds, each with the run beside it."""
    pairs = zip(measured.runs, reference.runs, strict=True)
    return statistics.median(run.step_s() / other.step_s() for run, other in pairs)


def rows_of(ablation: Ablation) -> list[dict[str, Any]]:
    """The numbers of every row, for JSON."""
    named = {measured.row.name: measured for measured in ablation.rows}
    return [
        {
            "name": measured.row.name,
            "title": measured.row.title,
            "layers_per_stage": list(measured.plan.layers_per_stage),
            "data_parallel_nic": measured.plan.group_of("dp", 0).nic_class,
            "overlap": measured.row.overlap,
            "slowdown": measured.row.slowdown,
            "testbed": measured.row.spec,
            "step_s": step_s(measured),
            "round_step_s": [run.step_s() for run in measured.runs],
            "times_reference": ratio(measured, named[measured.row.reference]),
            "reference": measured.row.reference,
            "others_cores": measured.others_cores,
            "largest_loss_difference": max(largest_difference(run, ablation.single) for run in measured.runs),
        }
        for measured in ablation.rows
    ]


def checks_of(rows: list[dict[str, Any]]) -> list[Check]:
    """The goals, measured. Equal losses are required; a goal of speed that is missed is said to be missed."""
    worst = max(rows, key=lambda row: float(row["largest_loss_difference"]))
    found = [
        Check("losses of all rows equal the single process at every step",
              worst["largest_loss_difference"] <= LOSS_TOLERANCE,
              f"largest relative difference {worst['largest_loss_difference']:.1e} ({worst['title']}), at most "
              f"{LOSS_TOLERANCE:g}"),
    ]  # fmt: skip
    named = {row["name"]: row["times_reference"] for row in rows}
    if "megatron" in named:
        ahead = named["megatron"]
        claim = "Holmes is ahead of the Megatron-LM-like layout"
        measured = f"{ahead:.2f}x, at least {AHEAD_OF_MEGATRON}x"
        found.append(Check(claim, ahead >= AHEAD_OF_MEGATRON, measured, required=False))
    if "one_cluster" in named:
        behind = 1 / named["one_cluster"] - 1
        claim = "Holmes over two clusters is as fast as in one fast cluster"
        measured = f"{behind:+.1%} step time, at most {BEHIND_ONE_CLUSTER:+.0%}"
        found.append(Check(claim, behind <= BEHIND_ONE_CLUSTER, measured, required=False))
    for name, part in (
        ("no_nic_choice", "NIC choice"),
        ("no_adapting", "the self-adapting partition"),
        ("no_overlap", "overlap"),
    ):
        if name in named:
            claim = f"without {part} a step takes longer"
            measured, differs = f"{named[name]:.2f}x", True
            if name == "no_adapting":
                layers = {row["name"]: row["layers_per_stage"] for row in rows}
                differs = layers["no_adapting"] != layers["holmes_slow"]
                measured += (
                    "" if differs else f", but both have layers {layers[name]}: the first run showed no difference"
                )
            found.append(Check(claim, named[name] > 1 and differs, measured, required=False))
    return found


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table, as `COLUMNS` names it."""
    rounds = [1e3 * seconds for seconds in row["round_step_s"]]
    is_reference = row["name"] == row["reference"]
    return (
        row["title"],
        " + ".join(map(str, row["layers_per_stage"])),
        f"{1e3 * row['step_s']:.0f} ms",
        f"{max(rounds):.0f} to {min(rounds):.0f} ms",
        "1" if is_reference else f"{row['times_reference']:.2f}x as long",
        f"{max(row['others_cores']):.2f}",
    )


def print_ablation(console: Console, rows: list[dict[str, Any]], checks: list[Check]) -> None:
    """The table and what became of the goals."""
    table = Table(title="Ablation", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "run" else "right")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    for check in checks:
        mark = "[green]ok[/]" if check.passed else "[red]failed[/]" if check.required else "[yellow]missed[/]"
        console.print(f"{mark:>6}  {check.claim}: {check.measured}", highlight=False)


def write_ablation(out: Path, ablation: Ablation, rows: list[dict[str, Any]], checks: list[Check]) -> None:
    """Writes `out`/ablation.json, ablation.md and ablation.png."""
    out.mkdir(parents=True, exist_ok=True)
    command = f"holmes demo --ablation --rounds {len(ablation.rows[0].runs)} --steps {ablation.settings.steps}"
    document = facts(command, dataclasses.asdict(ablation.settings))
    document |= {"emulated": emulated("cpu"), "rows": rows, "checks": [dataclasses.asdict(check) for check in checks]}
    (out / "ablation.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "ablation.md").write_text(markdown(document))
    draw(out / "ablation.png", rows)


def markdown(document: dict[str, Any]) -> str:
    """The table as a page that says how it came about."""
    settings, hardware = document["settings"], document["hardware"]
    lines = [
        "# What each part of Holmes is worth",
        "",
        f"`{document['command']}` on {document['date']}; {hardware['processor']}, {hardware['cores']} cores. "
        f"{document['emulated']}",
        "",
        f"{settings['layers']} layers of width {settings['width']}, {settings['micro_batches']} micro-batches, global "
        f"batch {settings['global_batch']}; rows take turns, each with a new job; medians of the slowest rank's steps.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + " --- |" * len(COLUMNS),
        *("| " + " | ".join(cells(row)) + " |" for row in document["rows"]),
        "",
        *(
            f"- {'met' if check['passed'] else 'MISSED'}: {check['claim']}: {check['measured']}"
            for check in document["checks"]
        ),
        "",
        "foreign cores: the most that other processes kept busy beside a run. The nodes share this machine's cores, so "
        "each computes at half a core's speed (after each layer a rank sleeps for as long as it computed), and where "
        "the second cluster is slower at 1 / 3.5 of one. Without overlap: reduce-scatters begin when the backward "
        "passes are over, the next step when all parameters are there.",
    ]
    return "\n".join(lines) + "\n"


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes a PNG: a bar for each row, its rounds as dots. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(10, 0.5 * len(rows) + 1.5), constrained_layout=True)
    places = range(len(rows))
    colors = ["#4c78a8" if row["name"] == row["reference"] else "#bab0ac" for row in rows]
    axis.barh(places, [1e3 * row["step_s"] for row in rows], color=colors)
    for place, row in zip(places, rows, strict=True):
        axis.plot([1e3 * seconds for seconds in row["round_step_s"]], [place] * len(row["round_step_s"]), "k.", ms=4)
        axis.annotate(f" {1e3 * row['step_s']:.0f} ms", (1e3 * max(row["round_step_s"]), place), va="center")
    axis.set_yticks(places, [row["title"] for row in rows])
    axis.invert_yaxis()
    axis.set(xlabel="ms per step", xlim=(0, 1.15e3 * max(max(row["round_step_s"]) for row in rows)))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
