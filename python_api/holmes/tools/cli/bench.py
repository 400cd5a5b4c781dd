"""`holmes bench`: measures collectives, nccl-tests style, with Gloo beside in the same run."""

from __future__ import annotations

import functools
import importlib
import os
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
from holmes.tools.bench.matrix import LAYOUTS, SIZES, Matrix, choose_layouts
from holmes.tools.bench.settings import STDOUT
from holmes.tools.cli.output import JsonFile, columns
from holmes.tools.cli.refusal import is_given, missing_module, refuse_given
from holmes_comm.errors import UsageError
from holmes_comm.nic_selection import NicSelection

_MOST_RANKS = 1024
# What a layout of the matrix says itself.
_OF_ONE_LAYOUT = ("ranks", "testbed", "nproc_per_node", "congestion_control", "transport", "nics", "through", "holmes")

_OF_A_SERIES = ("begin", "end", "factor")


def bench(
    context: typer.Context,
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
    transport: Annotated[str, typer.Option(help="Ours: auto, tcp, shm or rdma.")] = "auto",
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
    matrix: Annotated[
        bool,
        typer.Option(
            "--matrix",
            help="Every operation and size in each layout of --layouts, against the best of all peers; prints what is "
            "lost. Sizes are 8 to 256M where none are given.",
        ),
    ] = False,
    layouts: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="With --matrix: only these, separated by commas (loopback sockets, shared memory, links of 1 Gbit/s, "
            f"two clusters; the number is that of the ranks): {', '.join(LAYOUTS)}.",
            show_default=False,
        ),
    ] = None,
    json_file: JsonFile = None,
    plot_path: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--plot", help="Draw bandwidth and time against size into this file (.png, .svg, .pdf)."),
    ] = None,
) -> None:
    """Time, bandwidth and correctness of each operation and size.

    Columns are nccl-tests': bus bandwidth is algorithm bandwidth times 2(n-1)/n (all_reduce), (n-1)/n (reduce_scatter,
    all_gather, all_to_all, gather, scatter and their uneven forms), 2 (ping_pong) or 1. path is what carries the bytes:
    shared memory, TCP or RDMA. #wrong counts elements of the first call that differ from numpy's. cpu is the cores that
    all ranks keep busy, B/cpu the bytes of all ranks per second of processor time, foreign the cores that other
    processes kept busy meanwhile. /gloo and the like say how many times faster than that peer, as the median over
    rounds that ran in turns; with * over another path. A terminal too narrow for all columns has the most important
    ones; --json has all. Ctrl-C and SIGTERM end it early: --json and --plot have what was measured till then.
    """
    if matrix:
        refuse_given(context, _OF_ONE_LAYOUT, "--matrix has layouts of its own (--layouts)")
    else:
        refuse_given(context, ("layouts",), "layouts are those of --matrix")
        if testbed is None:
            refuse_given(context, ("nproc_per_node",), "it is for --testbed; --ranks says how many there are here")
    if sizes is not None:
        refuse_given(context, _OF_A_SERIES, "--sizes has all sizes")
    default_sizes = SIZES if matrix else ()
    is_size_given = any(is_given(context, name) for name in (*_OF_A_SERIES, "sizes"))
    settings = Settings(
        operations=tuple(operations or OPERATIONS),
        begin_bytes=parse_bytes(begin),
        end_bytes=parse_bytes(end),
        factor=factor,
        sizes=_parse_sizes(sizes) if sizes else () if is_size_given else default_sizes,
        dtype=dtype,
        op=op,
        through=through,
        transport=transport,
        nics=tuple(nics or ()),
        peers=() if matrix else _parse_peers(peers),
        holmes=holmes,
        rounds=rounds,
        seconds=seconds,
        warmup=warmup,
        timeout_s=timeout_s,
    )
    if not 1 <= ranks <= _MOST_RANKS:
        raise UsageError(f"ranks is {ranks}; it must be 1 to {_MOST_RANKS}: each is a process of this machine")
    for text in settings.nics:
        NicSelection.parse(text)  # before ranks are started
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
            if matrix:
                status = _run_matrix(settings, output, peers, layouts)
            elif own_rank() is not None:
                status = 0 if run_rank(settings, output) else 1
            elif testbed is not None:
                status = _launch_on_testbed(settings, output, testbed, nproc_per_node, congestion_control)
            else:
                status = launch(settings, ranks, output)
    except PeerError as error:
        typer.echo(f"holmes bench: {error}", err=True)
        status = 1
    raise typer.Exit(status)


def _run_matrix(settings: Settings, output: Output, peers: str | None, layouts: str | None) -> int:
    """Prints what is lost; 0 where everything was measured and right."""
    if output.json_path == STDOUT:
        raise UsageError("--matrix prints as it goes; give --json a file")
    if own_rank() is not None:
        raise UsageError("--matrix starts its ranks itself; run it without a launcher")
    chosen = _parse_peers(peers) if peers is not None else PEERS if find_spec("torch") else PEERS[1:]
    for peer in chosen:
        if peer not in PEERS:
            raise UsageError(f"peer {peer!r} is unknown; known are {', '.join(PEERS)}")
    # Operations with a root end on each rank as the peers' do.
    os.environ.setdefault("HOLMES_LOCAL_COMPLETION", "1")
    matrix = Matrix(settings, chosen, functools.partial(_launch_on_testbed, name_clusters=True), output.width)
    try:
        matrix.run(choose_layouts(layouts))
    finally:  # also where Ctrl-C ends it
        matrix.save(output.command, output.json_path, output.plot_path)
        typer.echo("\n" + "\n".join(matrix.report()))
    return 1 if matrix.failures else 0


def _launch_on_testbed(settings: Settings, output: Output, *nodes: Any, name_clusters: bool = False) -> int:
    """The lab's `launch_on_testbed`. Raises PeerError where the lab is not installed."""
    try:
        bench_module = importlib.import_module("holmes.lab.testbed.bench")
    except ModuleNotFoundError as error:
        raise PeerError(missing_module(error, "lab")) from error
    return int(bench_module.launch_on_testbed(settings, output, *nodes, name_clusters=name_clusters))


def _parse_sizes(text: str) -> tuple[int, ...]:
    return tuple(parse_bytes(size) for size in text.split(","))


def _parse_peers(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ("gloo",) if find_spec("torch") is not None else ()
    return () if text == "none" else tuple(dict.fromkeys(text.split(",")))
