"""`holmes simulate calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from holmes.planning.simulate import LinkRate, Rates, compute_from_bench, link_from_bench


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
        float | None, typer.Option(help="Instead of --compute: TFLOP/s that one GPU reaches inside a layer.")
    ] = None,
    shared_cores: Annotated[
        bool, typer.Option(help="All ranks share this machine's cores, as emulated nodes do; else each has its own.")
    ] = False,
) -> None:
    """Turn what `holmes bench` measured into the rates of `holmes simulate`."""
    try:
        measured, cores = compute_from_bench(compute) if compute is not None else (None, {})
        if shared_cores and not cores:
            raise ValueError("--shared-cores needs --compute FILE of `holmes bench compute --ranks 1,2,4 --json FILE`")
        links = dict(read_link(text) for text in link or ())
        rates = Rates(compute_tflops, links, measured, cores if shared_cores else {})
        rates.save(output)
    except (ValueError, OSError) as error:
        typer.echo(f"holmes simulate calibrate: {error}", err=True)
        raise typer.Exit(2) from None
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
        raise ValueError(f"{text!r} must be CLASS=FILE, such as ethernet=eth0.json")
    file, _, peer = path.partition(":")
    return nic_class, link_from_bench(file, peer or None)
