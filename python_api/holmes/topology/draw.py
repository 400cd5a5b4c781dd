"""A picture of a topology: clusters as boxes of hosts, fabrics as lines below them, labelled with class and rate."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes.topology.parts import Cluster, Fabric, Host
from holmes.topology.tables import duration, ranges
from holmes.topology.topology import Topology

_COLOURS = {"infiniband": "#2166ac", "roce_v2": "#c2512b", "roce_v1": "#d98c3f", "ethernet": "#4d8b4a"}
_TEXT = {"infiniband": "InfiniBand", "roce_v2": "RoCE v2", "roce_v1": "RoCE v1", "ethernet": "Ethernet"}
_GREY, _FAULT = "#666666", "#b00020"
_EACH_HOST = 6  # of a cluster with more, one box stands for all
# Sizes in inches.
_HOST_WIDTH, _HOST_HEIGHT, _GAP, _PAD, _LANE, _TITLE = 1.35, 0.85, 0.25, 0.25, 0.55, 0.38
_LEAST_WIDTH = 3.3  # of a cluster: its title and its fabrics' labels fit
_SMALL, _PLAIN = 7.5, 9


def draw_topology(topology: Topology, path: str | Path) -> None:
    """Writes .svg, .png or .pdf. Raises ValueError for another ending, or where matplotlib is missing."""
    path = Path(path)
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"{path}: a picture's name must end in .svg, .png or .pdf")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError(f"{path}: drawing needs matplotlib, which is not installed: pip install matplotlib") from None
    picture = _Picture(topology)
    figure = Figure(figsize=(picture.width, picture.height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, picture.width), ylim=(picture.height, 0))  # downwards
    axes.axis("off")
    picture.draw(axes)
    figure.savefig(path, dpi=160, facecolor="white")


@dataclass
class _Box:
    """One host, or the hosts of a large cluster, at x; `drops` of its lanes so far."""

    hosts: list[Host]
    x: float
    width: float
    drops: int = 0


class _Picture:
    """Where everything is; all sizes in inches, from the top left."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.faulty = {name for finding in topology.findings for name in finding.host.split(", ")}
        self.boxes: dict[str, list[_Box]] = {}
        self.frames: dict[str, tuple[float, float]] = {}  # x, width
        x = _PAD
        for cluster in topology.clusters:
            x = self._place(cluster, x) + _PAD
        self.width = max(x, 7.0)
        self.inner = {cluster.name: self._lanes(cluster) for cluster in topology.clusters}
        inside = {fabric.name for lanes in self.inner.values() for lane in lanes for fabric in lane}
        self.outer = _alike([fabric for fabric in topology.fabrics if fabric.name not in inside])
        self.top = _PAD + _TITLE
        self.frame_height = _TITLE + _HOST_HEIGHT + _PAD + _LANE * max(map(len, self.inner.values()), default=0)
        lines = int(self.width * 13)
        self.notes = [textwrap.wrap(f"! {finding}", lines) for finding in topology.findings[:12]]
        if len(topology.findings) > 12:
            self.notes.append([f"and {len(topology.findings) - 12} more findings"])
        self.notes_top = self.top + self.frame_height + _LANE * (len(self.outer) + 0.6)
        self.height = self.notes_top + 0.16 * sum(map(len, self.notes)) + (0.2 if self.notes else 0) + 0.05

    def _place(self, cluster: Cluster, x: float) -> float:
        """Places a cluster's boxes from x on; returns where it ends."""
        hosts = [self.topology.host_named(name) for name in cluster.hosts]
        each = [[host] for host in hosts] if len(hosts) <= _EACH_HOST else [hosts]
        box_width = _HOST_WIDTH if len(each) > 1 else 1.6 * _HOST_WIDTH
        content = len(each) * (box_width + _GAP) - _GAP
        width = max(content + 2 * _PAD, _LEAST_WIDTH)
        start = x + (width - content) / 2
        self.boxes[cluster.name] = [_Box(h, start + i * (box_width + _GAP), box_width) for i, h in enumerate(each)]
        self.frames[cluster.name] = (x, width)
        return x + width

    def _lanes(self, cluster: Cluster) -> list[list[Fabric]]:
        """The fabrics that only hosts of this cluster have, alike ones together."""
        own = {host.host_id for box in self.boxes[cluster.name] for host in box.hosts}
        return _alike([fabric for fabric in self.topology.fabrics if own.issuperset(fabric.ports)])

    def draw(self, axes: Any) -> None:
        """Draws everything."""
        topology = self.topology
        hosts, ranks = len(topology.hosts), topology.world_size
        title = f"{hosts} host{'s' * (hosts > 1)}, {ranks} rank{'s' * (ranks > 1)}, {len(topology.clusters)} cluster"
        axes.text(
            _PAD, _PAD + 0.05, title + "s" * (len(topology.clusters) > 1), fontsize=12, weight="bold", va="center"
        )
        for depth, lane in reversed(list(enumerate(self.outer))):
            y = self.top + self.frame_height + _LANE * (depth + 0.75)
            self._lane(axes, lane, [box for boxes in self.boxes.values() for box in boxes], y, 1)
        for cluster in topology.clusters:
            self._cluster(axes, cluster)
        y = self.notes_top + 0.1
        for lines in self.notes:
            axes.text(_PAD, y, "\n".join(lines), fontsize=_SMALL, color=_FAULT, va="top", linespacing=1.3)
            y += 0.16 * len(lines)

    def _cluster(self, axes: Any, cluster: Cluster) -> None:
        from matplotlib.patches import FancyBboxPatch

        x, width = self.frames[cluster.name]
        style = "round,pad=0,rounding_size=0.08"
        colour = _COLOURS.get(cluster.nic_class or "", _GREY)
        axes.add_patch(
            FancyBboxPatch((x, self.top), width, self.frame_height, boxstyle=style, fc="none", ec=colour, lw=1.2)
        )
        axes.add_patch(
            FancyBboxPatch((x, self.top), width, self.frame_height, boxstyle=style, fc=colour, ec="none", alpha=0.06)
        )
        size = f"{len(cluster.hosts)} host{'s' * (len(cluster.hosts) > 1)}, {len(cluster.ranks)} ranks"
        y = self.top + _TITLE / 2
        axes.text(x + 0.12, y, cluster.name, fontsize=_PLAIN, weight="bold", va="center", color=colour)
        axes.text(x + width - 0.12, y, size, fontsize=_SMALL, va="center", ha="right", color=_GREY)
        boxes = self.boxes[cluster.name]
        for depth, lane in reversed(list(enumerate(self.inner[cluster.name]))):
            y = self.top + _TITLE + _HOST_HEIGHT + _LANE * (depth + 0.75)
            self._lane(axes, lane, boxes, y, 0)
        for box in boxes:
            self._host(axes, box)

    def _host(self, axes: Any, box: _Box) -> None:
        from matplotlib.patches import FancyBboxPatch

        y = self.top + _TITLE
        bad = any(host.name in self.faulty for host in box.hosts)
        for offset in (0.1, 0.05, 0.0) if len(box.hosts) > 1 else (0.0,):
            axes.add_patch(
                FancyBboxPatch(
                    (box.x + offset, y - offset),
                    box.width,
                    _HOST_HEIGHT,
                    boxstyle="round,pad=0,rounding_size=0.05",
                    fc="white",
                    ec=_FAULT if bad else "#333333",
                    lw=1.6 if bad else 0.9,
                    zorder=3,
                )
            )
        first, last = box.hosts[0], box.hosts[-1]
        name = first.name if first is last else f"{first.name} .. {last.name}"
        ranks = ranges(rank for host in box.hosts for rank in host.ranks)
        lines = [("! " if bad else "") + _short(name, box.width), _short(f"ranks {ranks}", box.width)]
        if first.gpu:
            lines.append(_short(f"{len(first.ranks)} x {first.gpu}", box.width))
        for index, line in enumerate(lines):
            axes.text(
                box.x + box.width / 2,
                y + _HOST_HEIGHT / 2 + 0.19 * (index - (len(lines) - 1) / 2),
                line,
                fontsize=_PLAIN if index == 0 else _SMALL,
                weight="bold" if index == 0 else "normal",
                color=_FAULT if bad and index == 0 else "black" if index == 0 else _GREY,
                ha="center",
                va="center",
                zorder=4,
            )

    def _lane(self, axes: Any, fabrics: list[Fabric], boxes: list[_Box], y: float, outer: int) -> None:
        """One line for these fabrics, with a drop from every box that has a NIC in them, and the label above it."""
        fabric = fabrics[0]
        colour = _COLOURS.get(fabric.nic_class, _GREY)
        joined = [box for box in boxes if any(host.host_id in fabric.ports for host in box.hosts)]
        bottom = self.top + _TITLE + _HOST_HEIGHT
        ends = []
        for box in joined:
            box.drops += 1
            x = box.x + box.width * (1 - box.drops / (len(self.outer) + len(self.topology.fabrics[:4]) + 1))
            ends.append(x)
            axes.plot([x, x], [bottom, y], color=colour, lw=1.3, zorder=2, solid_capstyle="butt")
            axes.plot([x], [y], "o", color=colour, ms=4, zorder=3)
            nic = fabric.ports[next(host.host_id for host in box.hosts if host.host_id in fabric.ports)]
            axes.text(x + 0.03, bottom + 0.09, nic, fontsize=5.5, color=colour, va="center", zorder=5)
        line = {"lw": 3.5 if len(fabrics) > 1 else 2.2, "solid_capstyle": "round"}
        axes.plot([min(ends), max(ends)], [y, y], color=colour, zorder=2, **line)
        label = _label(self.topology, fabrics)
        x = _PAD if outer else self.frames[_cluster_of(self, joined[0])][0] + 0.12
        axes.text(
            x,
            y + 0.13,
            label,
            fontsize=_SMALL,
            color=colour,
            va="center",
            zorder=5,
            bbox={"fc": "white", "ec": "none", "pad": 0.6, "alpha": 0.85},
        )


def _cluster_of(picture: _Picture, box: _Box) -> str:
    return next(name for name, boxes in picture.boxes.items() if box in boxes)


def _label(topology: Topology, fabrics: list[Fabric]) -> str:
    fabric = fabrics[0]
    count = f"{len(fabrics)} x " if len(fabrics) > 1 else ""
    where = fabric.name.removeprefix(fabric.nic_class).strip() if len(fabrics) == 1 else ""
    text = f"{count}{_TEXT.get(fabric.nic_class, fabric.nic_class)} {where}".rstrip()
    rates = []
    if fabric.measured_gbps is not None:
        rates.append(f"{'at least ' * fabric.host_limited}{fabric.measured_gbps:g} Gbit/s measured")
    if fabric.speed_gbps is not None:
        rates.append(f"line rate {fabric.speed_gbps:g}" + (" Gbit/s" if fabric.measured_gbps is None else ""))
    if fabric.latency_s is not None:
        rates.append(duration(fabric.latency_s).replace("us", "\N{MICRO SIGN}s"))
    links = [link for link in topology.links if link.fabric == fabric.name and link.is_shared]
    if links:
        rates.append(f"shared: {min(link.aggregate_gbps for link in links):g} Gbit/s in all between two clusters")
    return ", ".join([text, *rates])


def _alike(fabrics: list[Fabric]) -> list[list[Fabric]]:
    """Rails together: fabrics of one class and rate with the same hosts."""
    groups: list[list[Fabric]] = []
    for fabric in fabrics:
        for group in groups:
            if group[0].is_like(fabric) and group[0].ports.keys() == fabric.ports.keys():
                group.append(fabric)
                break
        else:
            groups.append([fabric])
    return groups


def _short(text: str, width: float) -> str:
    """What fits into a box of this width, about 12 letters an inch."""
    most = int(width * 12.5)
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"
