"""`holmes simulate` and `holmes simulate calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from holmes import files
from holmes.cluster.topology import Topology
from holmes.planning.model.gpt import RECOMPUTATIONS, Transformer
from holmes.planning.model.presets import load_model, model_from_dict
from holmes.planning.plan.plan import Plan
from holmes.planning.simulate import (
    SCHEDULES,
    Framework,
    LinkRate,
    Rates,
    ScheduleChoice,
    best_schedule,
    compute_from_bench,
    draw,
    job_of_plan,
    link_from_bench,
    make_step,
    save_trace,
)
from holmes.planning.simulate import simulate as run
from holmes.planning.simulate.job import SYNCHRONIZATIONS
from holmes.tools.cli.output import JsonFile, say, show
from holmes_comm.errors import UsageError

BEST = "best"


def simulate(
    plan: Annotated[Path, typer.Argument(help="A saved plan, .yaml or .json.")],
    topology: Annotated[Path, typer.Option(help="The topology it was made for (`holmes topology --save`).")],
    rates: Annotated[
        Path, typer.Option(help="Rates: compute_tflops, and gbps, latency_s and jitter_s of each NIC class.")
    ],
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
        str | None,
        typer.Option(
            help=f"One of {', '.join(SCHEDULES)}; or {BEST}: the fastest, with its warm-up; default: the plan's.",
            show_default=False,
        ),
    ] = None,
    sharing: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --schedule best: pipelines that share the narrowest link, and may take turns on it."
        ),
    ] = None,
    most: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help=f"With --schedule {BEST}: micro-batches in flight that memory has room for, of each stage or of all; "
            "default: all.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help=f"With --schedule {BEST}: write the plan with that schedule (.yaml, .json).")
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
            help=f"What backward recomputes: {', '.join(RECOMPUTATIONS)}; default: the plan's, else full.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline as Chrome trace (.json).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the timeline (.png, .svg, .pdf).")] = None,
    json_file: JsonFile = None,
) -> None:
    """Step time, speed, bubble, exposed communication and bottleneck link of a plan, without running it."""
    files.check_writable(trace)
    files.check_picture(plot)
    if schedule != BEST and any(given is not None for given in (most, sharing, output)):
        raise UsageError(f"--most, --sharing and --output are of --schedule {BEST}, but it is {schedule or 'the plan'}")
    if output is not None:
        files.check_savable(output)
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
        schedule=None if schedule == BEST else schedule,
        chunks=chunks,
    )
    known = Rates.load(rates)
    for text in bench or ():
        known = known.with_link(*read_link(text))
    choices: tuple[ScheduleChoice, ...] = ()
    if schedule == BEST:
        choices = best_schedule(job, known, most=_most(most), sharing=sharing)
        if output is not None:
            choices[0].plan(loaded).save(output)
    result = choices[0].result if choices else run(make_step(job, known))
    equal_s = (
        run(make_step(job.with_equal_shares(), known)).step_s if loaded.has_uneven_shares and not choices else None
    )
    tflops = result.tflops_per_gpu(job.flops_per_sample, job.global_batch, job.gpus)
    speed = f"{tflops:.4g} TFLOP/s per GPU, {result.samples_per_s(job.global_batch):.4g} samples/s"
    found = {
        "step_s": result.step_s,
        "tflops_per_gpu": tflops,
        "samples_per_s": result.samples_per_s(job.global_batch),
        "bubble_share": result.bubble_share,
        "exposed_s": result.exposed_s,
        "bottleneck_link": result.bottleneck_link,
        "critical_s": result.critical_s,
        "link_bytes": result.link_bytes,
        "devices": result.devices,
    }
    lines = [
        f"{choice.text()}: step {choice.step_s:.4g} s, {'/'.join(map(str, choice.held))} micro-batches in flight"
        for choice in choices
    ]
    if equal_s is not None:
        found["equal_shares_step_s"] = equal_s
        lines.append(f"with equal shares: step {equal_s:.4g} s, {equal_s / result.step_s:.3g} times as long")
    if choices:
        names = ("schedule", "chunks", "warmup", "group", "turns", "held", "step_s")
        found["schedules"] = [{name: getattr(choice, name) for name in names} for choice in choices]
    show(json_file, found, lambda: say("\n".join([*lines, speed, result.describe()]), "  "))
    if trace is not None:
        save_trace(result, trace)
    if plot is not None:
        draw(result, plot)


def _most(text: str | None) -> int | list[int] | None:
    if text is None:
        return None
    numbers = text.split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        raise UsageError(f"--most {text!r} must be whole numbers, such as 8, or 8,6 for two stages")
    found = [int(number) for number in numbers]
    return found[0] if len(found) == 1 else found


def _model(name: str | None, plan: Plan) -> Transformer:
    """The model that is named, else the plan's. Raises ValueError where neither says it, or it has other layers."""
    if name is None and plan.model is None:
        raise UsageError("the plan does not say its model; pass --model, such as gpt-7.5b or a .yaml file of sizes")
    return load_model(name) if name is not None else model_from_dict(plan.model or {})


def calibrate(
    output: Annotated[Path, typer.Argument(help="Where the rates go: .yaml or .json, for `holmes simulate --rates`.")],
    link: Annotated[
        Optional[list[str]],  # noqa: UP045 (typer reads it at run time)
        typer.Option(
            metavar="CLASS=FILE[:PEER]",
            help="A NIC class and the `holmes bench --json` file of its rate; again for each class. "
            "PEER: of several in the file, such as gloo.",
        ),
    ] = None,
    compute: Annotated[
        Path | None, typer.Option(help="A `holmes bench compute --json` file: times of the model's parts.")
    ] = None,
    compute_tflops: Annotated[
        float | None, typer.Option(min=1e-6, help="Instead of --compute: TFLOP/s that one GPU reaches inside a layer.")
    ] = None,
    shared_cores: Annotated[
        bool, typer.Option(help="All ranks share this machine's cores, as emulated nodes do; else each has its own.")
    ] = False,
) -> None:
    """Turn what `holmes bench` measured into the rates of `holmes simulate`."""
    files.check_savable(output)
    measured, cores = compute_from_bench(compute) if compute is not None else (None, {})
    if shared_cores and not cores:
        raise UsageError("--shared-cores needs --compute FILE of `holmes bench compute --ranks 1,2,4 --json FILE`")
    links = dict(read_link(text) for text in link or ())
    rates = Rates(compute_tflops, links, measured, cores if shared_cores else {})
    rates.save(output)
    for name, rate in links.items():
        typer.echo(
            f"{name}: {rate.gbps:.4g} Gbit/s, latency {rate.latency_s * 1e6:.3g} us, "
            f"{rate.core_s_per_gb:.3g} core-seconds per GB"
        )
    if measured is not None:
        layer = measured.times.layer
        typer.echo(f"layer: forward {layer.forward_s * 1e3:.4g} ms, backward {layer.backward_s * 1e3:.4g} ms")
    for ranks, together in rates.cores.items():
        typer.echo(f"{ranks} ranks at once get {together:.2f} cores")


def read_link(text: str) -> tuple[str, LinkRate]:
    """CLASS=FILE[:PEER] as NIC class and rate. Raises ValueError where it is not of this form."""
    nic_class, equals, path = text.partition("=")
    if not equals:
        raise UsageError(f"{text!r} must be CLASS=FILE, such as ethernet=eth0.json")
    file, _, peer = path.partition(":")
    return nic_class, link_from_bench(file, peer or None)
