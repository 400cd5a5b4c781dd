"""`holmes bench`: measures collectives, nccl-tests style, with Gloo beside in the same run."""

from __future__ import annotations

import importlib
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from holmes import files
from holmes.interrupt import ending_early
from holmes.tools.bench import (
    OPERATIONS,
    PEERS,
    Output,
    PeerError,
    Settings,
    launch,
    own_rank,
    parse_bytes,
    run_rank,
)
from holmes.tools.cli.output import JsonFile, columns
from holmes.tools.cli.refusal import missing_module
from holmes_comm.errors import UsageError

_MOST_RANKS = 1024


def bench(
    operations: Annotated[
        Optional[list[str]],  # noqa: UP045 (typer reads it at run time)
        typer.Argument(
            help=f"What to measure (default: all): {', '.join(OPERATIONS)}.",
            show_default=False,
            autocompletion=lambda incomplete: [
                name for name in (*OPERATIONS, "compute") if name.startswith(incomplete)
            ],
        ),
    ] = None,
    begin: Annotated[str, typer.Option("-b", "--begin", help="Smallest size: 8, 64K, 1M, 1G (units of 1024).")] = "8",
    end: Annotated[str, typer.Option("-e", "--end", help="Largest size.")] = "64M",
    factor: Annotated[float, typer.Option("-f", "--factor", help="Each size is the one before times this.")] = 2.0,
    sizes: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Exactly these sizes instead of -b, -e and -f, such as 1K,64K,1M.", show_default=False),
    ] = None,
    dtype: Annotated[
        str, typer.Option("-d", "--dtype", help="Element type: float32, bfloat16, int64, ...")
    ] = "float32",
    op: Annotated[str, typer.Option("-o", "--op", help="Reduction: sum, avg, min, max, product, band, ...")] = "sum",
    ranks: Annotated[int, typer.Option(help="Processes started here; under torchrun or the testbed theirs count.")] = 4,
    testbed: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SPEC", help="Start the ranks on emulated nodes: a spec of `holmes testbed`.", show_default=False
        ),
    ] = None,
    nproc_per_node: Annotated[int, typer.Option(min=1, help="Ranks on each emulated node.")] = 1,
    congestion_control: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="TCP's default on the emulated nodes, for all libraries alike.", show_default=False),
    ] = None,
    transport: Annotated[str, typer.Option(help="Ours: auto, tcp or shm.")] = "auto",
    nics: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Ours: a NIC selection such as class:infiniband or eth1; give it again to compare several."),
    ] = None,
    through: Annotated[str, typer.Option(help="Ours: through its own api, or through torch.distributed.")] = "api",
    peers: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help=f"Libraries beside ours, in turns, separated by commas: {', '.join(PEERS)}; or none. "
            "Default: gloo where torch is installed.",
            show_default=False,
        ),
    ] = None,
    holmes: Annotated[bool, typer.Option("--holmes/--no-holmes", help="Ours.")] = True,
    rounds: Annotated[int, typer.Option(help="How often the peers take turns.")] = 5,
    seconds: Annotated[float, typer.Option(help="Timed work for each peer, operation and size.")] = 1.0,
    warmup: Annotated[int, typer.Option(help="Untimed calls for each peer, operation and size, at least.")] = 5,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Deadline of one operation in seconds.")] = 300.0,
    json_file: JsonFile = None,
    plot_path: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--plot", help="Draw bandwidth and time against size into this file (.png, .svg, .pdf)."),
    ] = None,
) -> None:
    """Time, bandwidth and correctness of each operation and size.

    Columns are nccl-tests': bus bandwidth is algorithm bandwidth times 2(n-1)/n (all_reduce), (n-1)/n (reduce_scatter,
    all_gather, all_to_all) or 1. path is what carries the bytes: shared memory or TCP. #wrong counts elements of the
    first call that differ from numpy's. cpu is the cores that all ranks keep busy, B/cpu the bytes of all ranks per
    second of processor time, foreign the cores that other processes kept busy meanwhile. /gloo and the like say how
    many times faster than that peer, as the median over rounds that ran in turns; with * over another path. A terminal
    too narrow for all columns has the most important ones; --json has all. Ctrl-C and SIGTERM end it early: --json and
    --plot have what was measured till then.
    """
    settings = Settings(
        operations=tuple(operations or OPERATIONS),
        begin_bytes=parse_bytes(begin),
        end_bytes=parse_bytes(end),
        factor=factor,
        sizes=tuple(parse_bytes(size) for size in sizes.split(",")) if sizes else (),
        dtype=dtype,
        op=op,
        through=through,
        transport=transport,
        nics=tuple(nics or ()),
        peers=_parse_peers(peers),
        holmes=holmes,
        rounds=rounds,
        seconds=seconds,
        warmup=warmup,
        timeout_s=timeout_s,
    )
    if not 1 <= ranks <= _MOST_RANKS:
        raise UsageError(f"ranks is {ranks}; it must be 1 to {_MOST_RANKS}: each is a process of this machine")
    if congestion_control is not None and testbed is None:
        raise UsageError("--congestion-control changes emulated nodes only; give --testbed, for example one-node")
    files.check_picture(plot_path)
    output = Output(
        shlex.join(["holmes", *sys.argv[1:]]),
        str(json_file) if json_file else None,
        str(plot_path) if plot_path else None,
        columns(),
    )
    try:
        with ending_early():
            if own_rank() is not None:
                status = 0 if run_rank(settings, output) else 1
            elif testbed is not None:
                status = _launch_on_testbed(settings, output, testbed, nproc_per_node, congestion_control)
            else:
                status = launch(settings, ranks, output)
    except PeerError as error:
        typer.echo(f"holmes bench: {error}", err=True)
        status = 1
    raise typer.Exit(status)


def _launch_on_testbed(settings: Settings, output: Output, *nodes: Any) -> int:
    """The lab's `launch_on_testbed`. Raises PeerError where the lab is not installed."""
    try:
        bench_module = importlib.import_module("holmes.lab.testbed.bench")
    except ModuleNotFoundError as error:
        raise PeerError(missing_module(error, "lab")) from error
    return int(bench_module.launch_on_testbed(settings, output, *nodes))


def _parse_peers(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ("gloo",) if find_spec("torch") is not None else ()
    return () if text == "none" else tuple(dict.fromkeys(text.split(",")))
