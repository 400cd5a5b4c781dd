"""`holmes bench compute`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from typing import Annotated, Any

import typer

from holmes.interrupt import ending_early
from holmes.tools.bench.compute import ComputeSettings, run_compute
from holmes.tools.bench.tables import compute_document
from holmes.tools.cli.output import STDOUT, JsonFile, show
from holmes_comm.errors import JobError, UsageError


def compute(
    hidden: Annotated[int, typer.Option(help="Hidden size.")],
    heads: Annotated[int, typer.Option(help="Attention heads.")],
    sequence: Annotated[int, typer.Option(help="Tokens of a sample.")],
    vocabulary: Annotated[int, typer.Option(help="Words of the vocabulary.")] = 51200,
    layers: Annotated[int, typer.Option(help="Layers that run one after the other; the result is of one.")] = 4,
    micro_batch: Annotated[int, typer.Option(help="Samples of a micro-batch.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(help="Threads of each rank.")] = 1,
    ranks: Annotated[str, typer.Option(help="Ranks that compute at once, such as 1,2,4: how they share cores.")] = "1",
    rounds: Annotated[int, typer.Option(help="The median of so many rounds counts.")] = 3,
    seconds: Annotated[float, typer.Option(help="Timed work for each part and round.")] = 1.0,
    json_file: JsonFile = None,
) -> None:
    """Forward and backward of a GPT's embedding, layer and head with loss, AdamW, and what holmes.DistributedOptimizer
    adds, with PyTorch on this machine."""
    if not all(number.isdigit() for number in ranks.split(",")):
        raise UsageError(f"--ranks {ranks!r} must be numbers with commas between, such as 1,2,4")
    numbers = tuple(int(number) for number in ranks.split(","))
    settings = ComputeSettings(
        hidden, heads, sequence, vocabulary, layers, micro_batch, dtype, device, threads, numbers, rounds, seconds
    )
    is_shown = json_file != STDOUT
    if is_shown:
        typer.echo(f"#{'ranks':>6} {'part':>10} {'forward':>12} {'backward':>12}")
        typer.echo(f"#{'':>6} {'':>10} {'(us)':>12} {'(us)':>12}")
    rows: list[dict[str, Any]] = []

    def on_row(row: dict[str, Any]) -> None:
        rows.append(row)
        if is_shown:
            _show(row)

    try:
        with ending_early():
            run_compute(settings, on_row)
    except JobError as error:
        typer.echo(f"holmes bench compute: {error}", err=True)
        raise typer.Exit(1) from None
    finally:  # also where Ctrl-C ends it
        if rows:
            command = shlex.join(["holmes", *sys.argv[1:]])
            show(json_file, compute_document(command, dataclasses.asdict(settings), rows), lambda: None)


def _show(row: dict[str, Any]) -> None:
    if "ns_per_parameter" in row:
        cells = f"{row['ns_per_parameter']:>9.4f} ns per parameter"
    else:
        cells = f"{row['forward_us']:>12.1f} {row['backward_us']:>12.1f}"
    typer.echo(f" {row['ranks']:>6} {row['part']:>10} {cells}")
