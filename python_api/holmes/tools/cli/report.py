"""`holmes report`."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Optional

import typer

from holmes import __version__, files
from holmes.cluster.topology import Topology
from holmes.planning.plan.plan import Plan
from holmes.tools.report.page import page
from holmes.tools.report.sections import bench_section, machine_section, plan_section, topology_section
from holmes.words import count
from holmes_comm.errors import UsageError
from holmes_comm.nics import discover_gpus, discover_nics


def report(
    output: Annotated[Path, typer.Argument(metavar="FILE", help="Where the page goes (.html).")],
    topology: Annotated[Path | None, typer.Option(help="The machines (`holmes topology --save`).")] = None,
    plan: Annotated[Path | None, typer.Option(help="A saved plan (`holmes plan --output`).")] = None,
    bench: Annotated[
        Optional[list[Path]],  # noqa: UP045 (typer reads it at run time)
        typer.Option(help="A `holmes bench --json` file; again for several."),
    ] = None,
    title: Annotated[str, typer.Option(help="Its heading.")] = "Holmes report",
    sysfs_root: Annotated[
        Path | None, typer.Option(help="Read this folder instead of HOLMES_SYSFS_ROOT or /sys.")
    ] = None,
) -> None:
    """One HTML page to pass on: this machine, and the topology, plan and measurements that are named.

    Tables and pictures are inside the file: it needs no network and no other file.
    """
    if output.suffix not in (".html", ".htm"):
        raise UsageError(f"{output}: the name must end in .html or .htm")
    files.check_writable(output)
    root = None if sysfs_root is None else str(sysfs_root)
    sections = [("This machine", machine_section(discover_nics(root), discover_gpus(root)))]
    machines = Topology.load(topology) if topology is not None else None
    if machines is not None:
        sections.append(("Topology", topology_section(machines)))
    if plan is not None:
        sections.append(("Plan", plan_section(Plan.load(plan), machines)))
    for path in bench or ():
        sections.append((f"Measured: {path.stem}", bench_section(files.load(path), path)))
    now = datetime.datetime.now(datetime.timezone.utc)
    files.replace(output, page(title, f"{now:%Y-%m-%d %H:%M} UTC, holmes {__version__}", sections))
    typer.echo(f"{output}: {count(len(sections), 'section')}, {output.stat().st_size / 1024:.0f} KiB")
