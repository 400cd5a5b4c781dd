"""`holmes plan --topology T --model M --global-batch B`: the search, and `holmes plan explain`."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from holmes import files
from holmes.cluster.topology import Topology
from holmes.planning.model.presets import load_model
from holmes.planning.plan.plan import Plan
from holmes.planning.schedule import TRAINERS
from holmes.planning.search import Assumptions, SearchResult, Wanted
from holmes.planning.search import search as run_search
from holmes.planning.search.candidate import Candidate
from holmes.planning.search.reasons import SHOWN, describe, order_text
from holmes.tools.cli.output import JsonFile, plain_console, say, show
from holmes_comm.errors import UsageError


def search(
    context: typer.Context,
    topology: Annotated[
        Path | None, typer.Option(help="The machines: `holmes topology --save`, or written by hand.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A preset such as gpt-7.5b or llama-3-70b, or a .yaml file of sizes.")
    ] = None,
    global_batch: Annotated[int | None, typer.Option(help="Samples of a step, all ranks together.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the plan (.yaml, .json).")] = None,
    tensor: Annotated[int | None, typer.Option(help="Fix the tensor-parallel size.")] = None,
    pipeline: Annotated[int | None, typer.Option(help="Fix the number of stages.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Fix the samples of a micro-batch.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Fix the schedule: gpipe, 1f1b, interleaved, zb-h1.")] = None,
    chunks: Annotated[int | None, typer.Option(help="Fix the chunks of a stage (interleaved).")] = None,
    recomputation: Annotated[str | None, typer.Option(help="Fix recomputation: none, selective, full.")] = None,
    trainer: Annotated[
        str | None, typer.Option("--for", help=f"Only what this trainer can run: {', '.join(TRAINERS)}.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU type where the topology names none, such as A100-80GB.")] = None,
    efficiency: Annotated[
        float | None,
        typer.Option(
            help="Share of its peak that a GPU reaches inside a layer.", show_default=str(Assumptions.efficiency)
        ),
    ] = None,
    compute_tflops: Annotated[
        float | None, typer.Option(help="Instead: what one GPU reaches, measured (`holmes bench compute`).")
    ] = None,
    nic_efficiency: Annotated[float, typer.Option(help="Share of a NIC's line rate, where not measured.")] = 0.9,
    tensor_gbps: Annotated[float | None, typer.Option(help="A GPU's rate to others of its host, each way.")] = None,
    reserve_gib: Annotated[float, typer.Option(help="GPU memory for driver, kernels, buffers, fragments.")] = 4.0,
    simulated: Annotated[int, typer.Option(help="Choices to partition exactly and simulate.")] = 12,
    json_file: JsonFile = None,
) -> None:
    """Search sizes, cluster order, layers per stage, schedule and recomputation for the fastest step within memory."""
    if context.invoked_subcommand is not None:
        return
    given = {"--topology": topology, "--model": model, "--global-batch": global_batch}
    if missing := [name for name, value in given.items() if value is None]:
        raise UsageError(f"{', '.join(missing)} must be given; or one of the commands in `holmes plan --help`")
    assert topology is not None and model is not None and global_batch is not None  # noqa: PT018
    files.check_savable(output)
    if efficiency is not None and compute_tflops is not None:
        raise UsageError(
            f"--efficiency {efficiency} and --compute-tflops {compute_tflops} both say what a GPU reaches; leave one"
        )
    efficiency = Assumptions.efficiency if efficiency is None else efficiency
    assumptions = Assumptions(efficiency, compute_tflops, gpu, nic_efficiency, reserve_gib, tensor_gbps)
    wanted = Wanted(tensor, pipeline, micro_batch, schedule, chunks, recomputation, trainer)
    console = plain_console(stderr=True)
    with console.status("estimating") as status:
        found = run_search(
            Topology.load(topology),
            load_model(model),
            global_batch,
            assumptions=assumptions,
            wanted=wanted,
            simulated=simulated,
            on_progress=status.update,
        )
    plan = found.plan()
    if output is not None:
        plan.save(output)
    candidates = [_row(candidate) for candidate in found.candidates]
    show(json_file, {"candidates": candidates, "plan": plan.to_dict()}, lambda: print_search(plain_console(), found))


_WORDS = ("schedule", "recompute", "order")


def _cells(candidate: Candidate, best: Candidate, order: str) -> dict[str, str]:
    """A row of the table by column; `order`: the letter of its order of the clusters."""
    choice = candidate.choice
    return {
        "step": f"{candidate.step_s:.4g}",
        "slower": f"{candidate.step_s / best.step_s - 1:.1%}",
        "tp": str(choice.tensor),
        "dp": str(choice.data),
        "pp": str(choice.pipeline),
        "mb": str(choice.micro_batch),
        "schedule": choice.schedule + (f" {choice.chunks}" if choice.chunks > 1 else ""),
        "recompute": choice.recomputation,
        "order": order,
        "bubble": f"{candidate.bubble_share:.1%}",
        "exposed": f"{sum(candidate.exposed_s.values()):.3g}",
        "mem": f"{candidate.memory_bytes / candidate.memory_limit_bytes:.0%}",
    }


def _row(candidate: Candidate) -> dict[str, Any]:
    return {
        **files.plain(candidate.choice),
        "layers_per_stage": candidate.layers_per_stage,
        "step_s": candidate.step_s,
        "tflops_per_gpu": candidate.tflops_per_gpu,
        "samples_per_s": candidate.samples_per_s,
        "bubble_share": candidate.bubble_share,
        "exposed_s": candidate.exposed_s,
        "memory_bytes": candidate.memory_bytes,
        "memory_limit_bytes": candidate.memory_limit_bytes,
        "bottleneck_link": candidate.bottleneck_link,
    }


def explain(
    plan: Annotated[Path, typer.Argument(help="A plan that `holmes plan --output` saved.")], json_file: JsonFile = None
) -> None:
    """Why this plan: its step, how much slower each alternative is, and what was assumed."""
    loaded = Plan.load(plan)
    if not loaded.reasons:
        raise UsageError(f"{plan} keeps no reasons: it was not made by `holmes plan`; `holmes plan show` describes it")
    first = loaded.describe().splitlines()[0]
    text = "\n".join([first, *(f"- {line}" for line in loaded.reasons)])
    show(json_file, {"plan": first, "reasons": loaded.reasons}, lambda: say(text, "  "))


def print_search(console: Console, found: SearchResult) -> None:
    """The simulated candidates as a table, the best one, and why."""
    best, shown = found.best, found.candidates[:SHOWN]
    orders = list(dict.fromkeys(candidate.choice.order for candidate in shown))
    letters = dict(zip(orders, string.ascii_uppercase, strict=False))
    rows = [_cells(candidate, best, letters[candidate.choice.order]) for candidate in shown]
    left_out = {"order"} if len(orders) == 1 else set()
    table = Table(
        title="Simulated, best first, times in seconds", title_justify="left", padding=(0, 0), collapse_padding=True
    )
    for column in rows[0]:
        if column not in left_out:
            table.add_column(column, justify="left" if column in _WORDS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell for column, cell in row.items() if column not in left_out))
    console.print(table)
    for order, letter in letters.items():
        if "order" not in left_out:
            say(f"order {letter}: {order_text(found.machines, order)}", "  ")
    runners_up = min(len(found.candidates), SHOWN) - 1
    lines = found.reasons()
    for line in [describe(found.machines, best), *(f"- {line}" for line in lines[2 + runners_up :])]:
        say(line, "  ")
