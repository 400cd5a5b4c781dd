"""`holmes simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from holmes.cluster.topology import Topology
from holmes.planning.model.gpt import RECOMPUTATIONS, Transformer
from holmes.planning.model.presets import load_model, model_from_dict
from holmes.planning.plan.plan import Plan
from holmes.planning.simulate import (
    SCHEDULES,
    Framework,
    Rates,
    draw,
    job_of_plan,
    make_step,
    save_trace,
)
from holmes.planning.simulate import simulate as run
from holmes.planning.simulate.job import SYNCHRONIZATIONS
from holmes.tools.cli.calibrate import read_link


def simulate(
    plan: Annotated[Path, typer.Argument(help="A saved plan, .yaml or .json.")],
    topology: Annotated[Path, typer.Option(help="The topology it was made for (`holmes topology --save`).")],
    rates: Annotated[Path, typer.Option(help="Rates: compute_tflops, and gbps and latency_s of each NIC class.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="A preset such as gpt-7.5b, or a .yaml file of sizes; default: the plan's.", show_default=False
        ),
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Samples of a step, all ranks together; default: the plan's.", show_default=False)
    ] = None,
    bench: Annotated[
        Optional[list[str]],  # noqa: UP045 (typer reads it at run time)
        typer.Option(
            metavar="CLASS=FILE[:PEER]",
            help="The rate of a NIC class, fitted to a `holmes bench --json` file; replaces the one in --rates.",
            show_default=False,
        ),
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Samples of a micro-batch; default: the plan's, else 1.", show_default=False)
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(SCHEDULES)}; default: the plan's.", show_default=False)
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(help="Model chunks of a stage, above 1 if interleaved; default: the plan's.", show_default=False),
    ] = None,
    synchronization: Annotated[str, typer.Option(help=f"One of {', '.join(SYNCHRONIZATIONS)}.")] = "sharded",
    overlap: Annotated[bool, typer.Option(help="Hide gradients behind backward and parameters behind forward.")] = True,
    recomputation: Annotated[
        str | None,
        typer.Option(
            help=f"What runs again before its backward: {', '.join(RECOMPUTATIONS)}; default: the plan's, else full.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline as Chrome trace (.json).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the timeline (.png, .svg, .pdf).")] = None,
) -> None:
    """Step time, speed, bubble, exposed communication and bottleneck link of a plan, without running it."""
    try:
        loaded = Plan.load(plan)
        job = job_of_plan(
            loaded,
            Topology.load(topology),
            _model(model, loaded),
            Framework(
                synchronization,
                overlap_reduce=overlap,
                overlap_gather=overlap,
                recomputation=recomputation or loaded.recomputation or "full",
            ),
            micro_batch=micro_batch,
            global_batch=global_batch,
            schedule=schedule,
            chunks=chunks,
        )
        known = Rates.load(rates)
        for text in bench or ():
            known = known.with_link(*read_link(text))
        result = run(make_step(job, known))
    except (ValueError, OSError) as error:
        typer.echo(f"holmes simulate: {error}", err=True)
        raise typer.Exit(2) from None
    tflops = result.tflops_per_gpu(job.flops_per_sample, job.global_batch, job.gpus)
    typer.echo(f"{tflops:.4g} TFLOP/s per GPU, {result.samples_per_s(job.global_batch):.4g} samples/s")
    typer.echo(result.describe())
    if trace is not None:
        save_trace(result, trace)
    if plot is not None:
        draw(result, plot)


def _model(name: str | None, plan: Plan) -> Transformer:
    """The model that is named, else the plan's. Raises ValueError where neither says it, or it has other layers."""
    if name is None and plan.model is None:
        raise ValueError("the plan does not say its model; pass --model, such as gpt-7.5b or a .yaml file of sizes")
    return load_model(name) if name is not None else model_from_dict(plan.model or {})
