"""What the report says of each thing: the same facts as the commands that show it alone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holmes.cluster.topology import Topology
from holmes.cluster.topology.draw import draw_topology
from holmes.cluster.topology.matrix import matrix_of
from holmes.cluster.topology.tables import duration, ranges
from holmes.planning.plan.plan import Plan
from holmes.planning.plan.proof import check
from holmes.tools.affinity import MEANINGS, affinity, placed
from holmes.tools.bench import tables
from holmes.tools.report.page import matrix, paragraphs, picture, section, table
from holmes_comm._C import host_name
from holmes_comm.errors import UsageError
from holmes_comm.nics import Nic

__all__ = ["bench_section", "machine_section", "plan_section", "topology_section"]


def machine_section(nics: Sequence[Nic], gpus: Sequence[Mapping[str, Any]]) -> str:
    """This host: hardware, versions, NICs, and how near GPUs are to them."""
    facts = tables.facts("", {})
    known = {"host": host_name(), **facts["hardware"], **facts["versions"], "GPUs": len(gpus)}
    rows = [
        (nic.name, nic.nic_class, nic.kind, nic.state, nic.speed_gbps, nic.mtu, nic.numa_node, "\n".join(nic.addresses))
        for nic in nics
    ]
    beside = placed(nics)
    near = ""
    if gpus and beside:
        words = affinity(gpus, beside)
        names = [str(gpu["pci_address"]) for gpu in gpus]
        near = matrix(names, [nic.name for nic in beside], [[(word, "") for word in row] for row in words])
        near += paragraphs(
            [f"{word}: {MEANINGS[word]}" for word in MEANINGS if any(word in row for row in words)], "dim"
        )
    return (
        table(("", ""), known.items())
        + section("NICs", table(("NIC", "class", "kind", "state", "Gbit/s", "MTU", "NUMA", "addresses"), rows))
        + section("GPUs and NICs", near)
    )


def topology_section(topology: Topology) -> str:
    """The picture, clusters, fabrics, links, host by host, and what was found wrong."""
    names = {host.host_id: host.name for host in topology.hosts}
    clusters = [(c.name, len(c.hosts), ranges(c.ranks), c.fabric or "none") for c in topology.clusters]
    fabrics = [
        (
            fabric.name,
            _some([names[host_id] for host_id in fabric.ports]),
            fabric.speed_gbps,
            fabric.measured_gbps,
            duration(fabric.latency_s),
            "yes" if fabric.confirmed else "no",
        )
        for fabric in topology.fabrics
    ]
    links = [
        (" - ".join(link.clusters), link.fabric, link.gbps, duration(link.latency_s), link.pairs, link.aggregate_gbps)
        for link in topology.links
    ]
    rates = matrix_of(topology)
    cells = [
        [
            (cell.text, "bad" if cell.is_bad else "" if cell.is_measured else "dim") if cell else ("", "dim")
            for cell in row
        ]
        for row in rates.cells
    ]
    return (
        paragraphs([str(finding) for finding in topology.findings], "bad")
        + _drawn(lambda path: draw_topology(topology, path), "Clusters and fabrics")
        + section("Clusters", table(("cluster", "hosts", "ranks", "fabric"), clusters))
        + section(
            "Fabrics, best first, in Gbit/s",
            table(("fabric", "hosts", "line", "measured", "latency", "tested"), fabrics),
        )
        + section(
            "Between clusters, in Gbit/s",
            table(("clusters", "fabric", "one pair", "latency", "pairs at once", "in all"), links),
        )
        + section(
            f"Gbit/s between {rates.kind}; in brackets of the network, not of this pair",
            matrix(rates.names, rates.names, cells),
            paragraphs([f"{' - '.join(one.hosts)}: {one.why}" for one in rates.bad], "bad"),
        )
    )


def plan_section(plan: Plan, topology: Topology | None) -> str:
    """What it says, why, and the proof of its groups."""
    from html import escape

    proven = ""
    if topology is not None:
        if plan.world_size != topology.world_size:
            raise UsageError(
                f"the plan is for {plan.world_size} ranks, the topology has {topology.world_size}; name the one that "
                "the plan was made for"
            )
        proof = check(plan, topology)
        rows = [
            (
                r.kind,
                f"{r.groups} of {r.ranks}",
                r.networks,
                r.crossing,
                r.rule,
                f"{r.wrong} wrong" if r.wrong else "holds",
            )
            for r in proof.rows
        ]
        wrong = proof.describe().splitlines()[len(proof.rows) :]
        proven = table(("kind", "groups", "networks", "crossing", "must be", "proof"), rows) + paragraphs(wrong, "bad")
    return (
        f"<pre>{escape(replace(plan, reasons=()).describe())}</pre>"
        + section("Proof that groups keep to their networks", proven)
        + section("Why", paragraphs(plan.reasons))
    )


def bench_section(document: Mapping[str, Any], path: Path) -> str:
    """A `holmes bench --json` file: picture and rows. Raises UsageError naming `path` where it is none."""
    try:
        rows = [
            (
                row["operation"],
                row["peer"],
                int(row["size_bytes"]),
                float(row["time_us"]),
                None if row["p99_us"] is None else float(row["p99_us"]),
                float(row["bus_gb_per_s"]),
                None if row["wrong_elements"] is None else int(row["wrong_elements"]),
            )
            for row in document["rows"]
        ]
        told = (
            f"{document['command']}; {document['ranks']} ranks, {document['hardware']['processor']}, {document['date']}"
        )
        drawn = ""
        if any(row[2] for row in rows):
            drawn = _drawn(lambda file: tables.draw(file, dict(document)), "Bandwidth and time against size")
    except KeyError as error:
        raise UsageError(f"{path} is no file of `holmes bench --json`: it has no {error}") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path} is no file of `holmes bench --json`: {error}") from None
    headers = ("operation", "peer", "bytes", "time (us)", "p99 (us)", "busbw (GB/s)", "wrong")
    return paragraphs([told], "dim") + drawn + table(headers, rows)


def _drawn(draw: Callable[[Path], None], title: str) -> str:
    """A picture, where matplotlib is installed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture.svg"
        try:
            draw(file)
        except ModuleNotFoundError:
            return paragraphs([f"{title}: no picture without matplotlib (pip install 'holmes-comm[plot]')"], "dim")
        return picture(file.read_bytes(), title)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 16 else f"{names[0]} .. {names[-1]} ({len(names)})"
