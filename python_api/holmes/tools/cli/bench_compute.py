"""`holmes bench compute`."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from holmes import files
from holmes.tools.bench.compute import ComputeSettings, run_compute
from holmes.tools.bench.tables import compute_document
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
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Also write the results to this file, for `holmes simulate calibrate`."),
    ] = None,
) -> None:
    """Forward and backward of a GPT's embedding, layer and head with loss, AdamW, and what holmes.DistributedOptimizer
    adds, with PyTorch on this machine."""
    files.check_writable(json_path)
    if not all(number.isdigit() for number in ranks.split(",")):
        raise UsageError(f"--ranks {ranks!r} must be numbers with commas between, such as 1,2,4")
    numbers = tuple(int(number) for number in ranks.split(","))
    settings = ComputeSettings(
        hidden, heads, sequence, vocabulary, layers, micro_batch, dtype, device, threads, numbers, rounds, seconds
    )
    typer.echo(f"#{'ranks':>6} {'part':>10} {'forward':>12} {'backward':>12}")
    typer.echo(f"#{'':>6} {'':>10} {'(us)':>12} {'(us)':>12}")
    try:
        rows = run_compute(settings, _show)
    except JobError as error:
        typer.echo(f"holmes bench compute: {error}", err=True)
        raise typer.Exit(1) from None
    if json_path is not None:
        command = shlex.join(["holmes", *sys.argv[1:]])
        document = compute_document(command, dataclasses.asdict(settings), rows)
        json_path.write_text(json.dumps(document, indent=1) + "\n")


def _show(row: dict[str, Any]) -> None:
    if "ns_per_parameter" in row:
        cells = f"{row['ns_per_parameter']:>9.4f} ns per parameter"
    else:
        cells = f"{row['forward_us']:>12.1f} {row['backward_us']:>12.1f}"
    typer.echo(f" {row['ranks']:>6} {row['part']:>10} {cells}")
