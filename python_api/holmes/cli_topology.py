"""`holmes topology`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from holmes.topology import Topology, make_topology, merge_hosts


def topology(
    save: Annotated[Path | None, typer.Option(help="Write it to this .yaml or .json file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Bound of one connection attempt.")] = 3.0,
) -> None:
    """All hosts' NICs, which fabrics really connect, and the clusters that follow.

    Run it as a job of one or more ranks per host (torchrun, `holmes testbed run`); without one it shows this host only.
    Rank 0 prints.
    """
    rank, found = _gather(timeout_s)
    if rank != 0:
        return
    if save is not None:
        found.save(save)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        print_topology(Console(), found)


def print_topology(console: Console, found: Topology) -> None:
    """Prints the clusters with their hosts' ports, and the fabrics."""
    hosts = Table(title="Clusters", title_justify="left")
    for column in ("cluster", "host", "ranks", "NIC", "class", "address", "Gbit/s"):
        hosts.add_column(column, justify="right" if column == "Gbit/s" else "left")
    for cluster in found.clusters:
        for host in (host for host in found.hosts if host.name in cluster.hosts):
            ranks = ", ".join(map(str, host.ranks))
            for port in host.ports:
                hosts.add_row(
                    cluster.name, host.name, ranks, port.name, port.nic_class, port.address, _speed(port.speed_gbps)
                )
            if not host.ports:
                hosts.add_row(cluster.name, host.name, ranks, "none usable")
    console.print(hosts)
    fabrics = Table(title="Fabrics, best first", title_justify="left")
    for column in ("fabric", "hosts", "Gbit/s", "connections"):
        fabrics.add_column(column, justify="right" if column == "Gbit/s" else "left")
    names = {host.host_id: host.name for host in found.hosts}
    for fabric in found.fabrics:
        members = ", ".join(names[host_id] for host_id in fabric.ports)
        fabrics.add_row(fabric.name, members, _speed(fabric.speed_gbps), "tried" if fabric.confirmed else "assumed")
    console.print(fabrics)


def _gather(timeout_s: float) -> tuple[int, Topology]:
    """This process's rank and the job's topology; collective where torchrun's variables are set."""
    if "WORLD_SIZE" not in os.environ:
        from holmes.probe import local_inventory

        return 0, make_topology(merge_hosts([local_inventory(0)]), [])
    from torch.distributed.rendezvous import rendezvous

    from holmes.probe import discover_topology

    store, rank, size = next(rendezvous("env://"))
    found = discover_topology(store, rank, size, "holmes/topology", timeout_s)
    store.set(f"holmes/topology/done/{rank}", "")
    if rank == 0:  # it may serve the store, so it leaves last
        store.wait([f"holmes/topology/done/{other}" for other in range(size)])
    return rank, found


def _speed(speed_gbps: float | None) -> str:
    return "unknown" if speed_gbps is None else f"{speed_gbps:g}"
