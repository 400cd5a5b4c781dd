"""Host by host: the rate of the best network that two hosts share, and which pairs are worse than they should be."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from holmes.cluster.topology.fabrics import candidate_fabrics
from holmes.cluster.topology.measured import SLOW_SHARE
from holmes.cluster.topology.parts import Fabric, Host, Pair
from holmes.cluster.topology.topology import Topology
from holmes.words import count

__all__ = ["BadPair", "Cell", "Matrix", "matrix_of", "print_matrix"]

_EACH_HOST = 32  # up to so many hosts have rows of their own; else the clusters


@dataclass(frozen=True)
class Cell:
    """Gbit/s between two hosts or clusters; None: unknown. `fabric`: their best one, empty where they share none.

    `is_measured`: of this very pair; else the rate is the fabric's.
    """

    gbps: float | None = None
    fabric: str = ""
    is_measured: bool = False
    is_bad: bool = False

    @property
    def text(self) -> str:
        """In few letters: brackets where the rate is not of this pair, "?" an unknown one, "-" no network, "!" bad."""
        rate = "-" if not self.fabric else "?" if self.gbps is None else f"{self.gbps:.3g}"
        rate = rate if self.is_measured or not self.fabric else f"({rate})"
        return rate + ("!" if self.is_bad else "")


@dataclass(frozen=True)
class BadPair:
    """Two hosts, by name, and what is wrong between them."""

    hosts: tuple[str, str]
    why: str


@dataclass(frozen=True)
class Matrix:
    """`names` of `kind` "hosts" or "clusters", a row of cells for each (None: itself), and the bad pairs of hosts."""

    kind: str
    names: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]
    bad: tuple[BadPair, ...]


def matrix_of(topology: Topology) -> Matrix:
    """Of the hosts; where they are many, of the clusters, each cell the rate of the fabric that joins all of them.

    A pair is bad that was measured below half of its fabric's rate, or whose NICs are of one subnet and class and do
    not reach each other though others of the topology were tried.
    """
    measured = {frozenset(zip(pair.hosts, pair.nics, strict=True)): pair.gbps for pair in topology.pairs}
    bad = {frozenset(one.hosts): one for one in _bad_pairs(topology, measured)}
    if len(topology.hosts) <= _EACH_HOST:
        names = [host.name for host in topology.hosts]
        groups = [[host] for host in topology.hosts]
        kind = "hosts"
    else:
        names = [cluster.name for cluster in topology.clusters]
        groups = [[topology.host_named(name) for name in cluster.hosts] for cluster in topology.clusters]
        kind = "clusters"
    cells = tuple(
        tuple(
            None if one is other and len(one) == 1 else _cell(topology, one, other, measured, bad.keys())
            for other in groups
        )
        for one in groups
    )
    return Matrix(kind, tuple(names), cells, tuple(bad.values()))


Measured = dict[frozenset[tuple[str, str]], float]


def _cell(
    topology: Topology, some: Sequence[Host], others: Sequence[Host], measured: Measured, bad: Set[frozenset[str]]
) -> Cell:
    fabrics = topology.fabrics_between(dict.fromkeys(host.host_id for host in (*some, *others)))
    if len(some) == len(others) == 1:
        is_bad = frozenset((some[0].name, others[0].name)) in bad
        if fabrics and (rate := measured.get(_nics(fabrics[0], some[0], others[0]))) is not None:
            return Cell(rate, fabrics[0].name, True, is_bad)
    else:
        is_bad = any(frozenset((one.name, other.name)) in bad for one in some for other in others)
    return Cell(fabrics[0].rate_gbps, fabrics[0].name, False, is_bad) if fabrics else Cell(is_bad=is_bad)


def _nics(fabric: Fabric, one: Host, other: Host) -> frozenset[tuple[str, str]]:
    return frozenset((host.name, fabric.ports[host.host_id]) for host in (one, other))


def _bad_pairs(topology: Topology, measured: Measured) -> Iterator[BadPair]:
    slow: dict[str, list[Pair]] = {}
    good: dict[str, list[float]] = {}
    for pair in topology.pairs:
        one, other = (topology.host_named(name) for name in pair.hosts)
        shared = topology.fabrics_between((one.host_id, other.host_id))
        nics = frozenset(zip(pair.hosts, pair.nics, strict=True))
        fabric = next((fabric for fabric in shared if _nics(fabric, one, other) == nics), None)
        typical = fabric.measured_gbps if fabric else None
        if fabric and typical and pair.gbps < SLOW_SHARE * typical:
            slow.setdefault(fabric.name, []).append(pair)
        elif fabric:
            good.setdefault(fabric.name, []).append(pair.gbps)
    fabrics = {fabric.name: fabric for fabric in topology.fabrics}
    for name, pairs in slow.items():
        others = statistics.median(good.get(name) or [fabrics[name].measured_gbps or 0.0])
        for pair in pairs:
            share = f"{pair.gbps / others:.2g} of the others' {others:.3g} on {name}"
            yield BadPair(pair.hosts, f"{pair.gbps:.3g} Gbit/s, {share}")
    if not any(fabric.confirmed for fabric in topology.fabrics) or len(topology.hosts) > _EACH_HOST:
        return
    joined = [(f.nic_class, f.subnet, f.ports.keys()) for f in topology.fabrics]
    for fabric in candidate_fabrics(topology.hosts):
        members = [host for host in topology.hosts if host.host_id in fabric.ports]
        for index, one in enumerate(members):
            for other in members[index + 1 :]:
                ids = {one.host_id, other.host_id}
                if not any(ids <= ports for c, s, ports in joined if (c, s) == (fabric.nic_class, fabric.subnet)):
                    yield BadPair((one.name, other.name), f"out of each other's reach on {fabric.name}")


def print_matrix(console: Console, matrix: Matrix) -> None:
    """Rows and columns alike; names that are too long for columns are numbered, and columns go on below where they are
    too many."""
    names = list(matrix.names)
    rows = [[cell.text if cell else "." for cell in row] for row in matrix.cells]
    width = max([5, *(len(text) for row in rows for text in row)]) + 1
    numbered = any(len(name) >= width for name in names)
    first = [f"{number} {name}" if numbered else name for number, name in enumerate(names)]
    headers = [str(number) for number in range(len(names))] if numbered else names
    left = min(max(map(len, first)), 24)
    fit = max(1, (console.width - left) // width)
    console.print(f"Gbit/s between {matrix.kind}; (of the network, not this pair); ! bad", highlight=False)
    for start in range(0, len(names), fit):
        shown = range(start, min(start + fit, len(names)))
        console.print(Text(" " * left + "".join(f"{headers[n]:>{width}}" for n in shown), style="bold"))
        for name, row, cells in zip(first, rows, matrix.cells, strict=True):
            line = Text(f"{name[:left]:<{left}}")
            for number in shown:
                cell = cells[number]
                style = "bold red" if cell and cell.is_bad else "dim" if cell is None or not cell.is_measured else ""
                line.append(f"{row[number]:>{width}}", style=style)
            console.print(line)
    for one in matrix.bad:
        text = f"! {' - '.join(one.hosts)}: {one.why}"
        console.print(Text(textwrap.fill(text, console.width, subsequent_indent="  "), style="red"))
    measured = sum(cell.is_measured for row in matrix.cells for cell in row if cell)
    if matrix.kind == "hosts" and not measured and len(names) > 1:
        console.print("no pair was measured; `holmes topology --save` in a job measures and keeps them")
    elif not matrix.bad:
        console.print(f"no bad pair among {count(measured // 2, 'measured one')}" if measured else "no bad pair")
