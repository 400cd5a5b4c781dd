"""`holmes topology`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holmes import files
from holmes.cluster.topology import Topology, make_topology, merge_hosts
from holmes.cluster.topology.matrix import matrix_of, print_matrix
from holmes.cluster.topology.tables import print_topology
from holmes.tools.cli.output import JsonFile, plain_console, show
from holmes.tools.job_store import in_job, join_job
from holmes_comm.errors import UsageError

_TIMEOUT_S = 3.0
_MEASURE_S = 3.0
_JOIN_S = 60.0


def topology(
    file: Annotated[
        Path | None, typer.Argument(help="A topology's .yaml or .json file, to check and show instead of discovering.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write it to this .yaml or .json file.")] = None,
    draw: Annotated[Path | None, typer.Option(help="Draw it (.svg, .png or .pdf); needs matplotlib.")] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Host by host: the rate between each two, bad pairs marked.")
    ] = False,
    json_file: JsonFile = None,
    timeout_s: Annotated[
        float | None, typer.Option(min=0.1, help="Bound of one connection attempt.", show_default=str(_TIMEOUT_S))
    ] = None,
    measure_s: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="How long to measure rates; all in all about twice that. 0: not at all.",
            show_default=str(_MEASURE_S),
        ),
    ] = None,
    join_timeout_s: Annotated[
        float | None, typer.Option(min=0.1, help="How long to wait for all ranks to come.", show_default=str(_JOIN_S))
    ] = None,
) -> None:
    """All hosts' NICs, which fabrics really connect and how fast, the clusters that follow, and what looks wrong.

    Run it as a job of one or more ranks per host (torchrun, `holmes testbed run`); without one it shows this host only.
    Rank 0 prints. With FILE it needs no job.
    """
    files.check_savable(save)
    files.check_picture(draw)
    bounds = {"--timeout-s": timeout_s, "--measure-s": measure_s, "--join-timeout-s": join_timeout_s}
    given = [name for name, value in bounds.items() if value is not None]
    if file is not None and given:
        raise UsageError(f"{', '.join(given)}: nothing is measured where a file is read; leave this out, or {file}")
    if file is not None:
        rank, found = 0, Topology.load(file)
    else:
        rank, found = _gather(
            _TIMEOUT_S if timeout_s is None else timeout_s,
            _MEASURE_S if measure_s is None else measure_s,
            _JOIN_S if join_timeout_s is None else join_timeout_s,
        )
    if rank != 0:
        return
    if save is not None:
        found.save(save)
    if draw is not None:
        from holmes.cluster.topology.draw import draw_topology

        draw_topology(found, draw)
    if matrix:
        rates = matrix_of(found)
        show(json_file, rates, lambda: print_matrix(plain_console(), rates))
        return
    show(json_file, found.to_dict(), lambda: print_topology(Console(), found))


def _gather(timeout_s: float, measure_s: float, join_timeout_s: float) -> tuple[int, Topology]:
    """This process's rank and the job's topology; collective where a launcher started a job."""
    if not in_job():
        from holmes.cluster.probe import local_inventory

        return 0, make_topology(merge_hosts([local_inventory(0)]), [])
    from holmes.cluster.probe import discover_topology

    with join_job("holmes/topology", join_timeout_s) as job:
        return job.rank, discover_topology(job.store, job.rank, job.size, "holmes/topology", timeout_s, measure_s)
