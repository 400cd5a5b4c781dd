"""A topology as tables for the terminal; many hosts alike take one row."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holmes.cluster.topology.fabrics import rails_together
from holmes.cluster.topology.parts import Fabric, Host, Port
from holmes.cluster.topology.topology import Topology

_EACH_HOST = 16  # up to so many hosts have rows of their own


def print_topology(console: Console, topology: Topology) -> None:
    """Prints the clusters with their hosts' NICs, the fabrics, the links between clusters, and what was found wrong."""
    console.print(_clusters(topology), markup=False)
    if topology.fabrics:
        console.print(_fabrics(topology), markup=False)
    if topology.links:
        console.print(_links(topology), markup=False)
    for finding in topology.findings:
        console.print(f"[bold red]![/] {escape(str(finding))}", highlight=False)


def _clusters(topology: Topology) -> Table:
    table = Table(title="Clusters", title_justify="left")
    has_gpus = any(host.gpu for host in topology.hosts)
    for column in ("cluster", "host", "ranks", *(["GPU"] if has_gpus else []), "NIC", "class", "address", "Gbit/s"):
        table.add_column(column, justify="right" if column == "Gbit/s" else "left", overflow="fold")
    each = len(topology.hosts) <= _EACH_HOST
    for cluster in topology.clusters:
        hosts = [topology.host_named(name) for name in cluster.hosts]
        for alike in [[host] for host in hosts] if each else _runs(hosts):
            ranks = ranges(rank for host in alike for rank in host.ranks)
            start = [
                cluster.name,
                _span([host.name for host in alike]),
                ranks,
                *([alike[0].gpu or ""] if has_gpus else []),
            ]
            rows = [[port] for port in alike[0].ports] if each else list(_rails(alike[0].ports))
            for index, ports in enumerate(rows):
                place = start if index == 0 else [""] * len(start)
                wires = list(dict.fromkeys(port.subnet for port in ports))
                one = len(alike) == len(ports) == 1 and ports[0].address
                nics = _span([port.name for port in ports])
                address = ports[0].address if one else f"{wires[0]} .. {wires[-1]}" if len(wires) > 1 else wires[0]
                table.add_row(*place, nics, ports[0].nic_class, address, _number(ports[0].speed_gbps))
            if not rows:
                table.add_row(*start, "none usable")
    return table


def _fabrics(topology: Topology) -> Table:
    table = Table(title="Fabrics, best first, in Gbit/s", title_justify="left")
    for column in ("fabric", "hosts", "line", "measured", "latency", "tested"):
        left = column in ("fabric", "hosts", "tested")
        table.add_column(column, justify="left" if left else "right", no_wrap=column in ("fabric", "latency"))
    names = {host.host_id: host.name for host in topology.hosts}
    rails = [[fabric] for fabric in topology.fabrics]
    for group in rails if len(topology.hosts) <= _EACH_HOST else rails_together(topology.fabrics):
        fabric = group[0]
        members = [names[host_id] for host_id in fabric.ports]
        hosts = ", ".join(members) if len(members) <= _EACH_HOST else _span(members)
        name = fabric.name if len(group) == 1 else f"{fabric.name} .. {group[-1].subnet} ({len(group)})"
        tested = "yes" if fabric.confirmed else "no"
        table.add_row(name, hosts, _number(fabric.speed_gbps), _measured(fabric), duration(fabric.latency_s), tested)
    return table


def _links(topology: Topology) -> Table:
    table = Table(title="Between clusters, in Gbit/s", title_justify="left")
    for column in ("clusters", "fabric", "one pair", "latency", "at once", "in all"):
        left = column in ("clusters", "fabric")
        table.add_column(column, justify="left" if left else "right", no_wrap=column in ("fabric", "latency"))
    for link in topology.links:
        total = f"{link.aggregate_gbps:g}" + (" (shared)" if link.is_shared else "")
        table.add_row(
            " - ".join(link.clusters),
            link.fabric,
            f"{link.gbps:g}",
            duration(link.latency_s),
            f"{link.pairs} pairs",
            total,
        )
    return table


def ranges(numbers: Iterable[int]) -> str:
    """Numbers with their runs shortened: "0-3, 8"."""
    parts = []
    for _, group in itertools.groupby(enumerate(sorted(numbers)), key=lambda item: item[1] - item[0]):
        run = [number for _, number in group]
        parts.append(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)))
    return ", ".join(parts)


def duration(seconds: float | None) -> str:
    """A short time in the unit that fits; empty where unknown."""
    if seconds is None:
        return ""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _measured(fabric: Fabric) -> str:
    if fabric.measured_gbps is None:
        return ""
    text = (">= " if fabric.host_limited else "") + f"{fabric.measured_gbps:g}"
    least = fabric.measured_min_gbps
    return text if least is None or least == fabric.measured_gbps else f"{text} (least {least:g})"


def _runs(hosts: Sequence[Host]) -> Iterator[list[Host]]:
    """Neighbours that differ only in name, ranks and addresses."""

    def look(host: Host) -> tuple[object, ...]:
        ports = tuple((port.name, port.nic_class, port.subnet, port.speed_gbps) for port in host.ports)
        return (ports, len(host.ranks), host.gpu, host.gpu_memory_gib, host.gpu_tflops)

    return (list(run) for _, run in itertools.groupby(hosts, key=look))


def _rails(ports: Sequence[Port]) -> Iterator[list[Port]]:
    return (list(run) for _, run in itertools.groupby(ports, key=lambda port: (port.nic_class, port.speed_gbps)))


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"
