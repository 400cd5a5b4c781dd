"""A picture of a topology: clusters as boxes of hosts, fabrics as lines below them, labelled with class and rate."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes import files
from holmes.cluster.topology.fabrics import rails_together
from holmes.cluster.topology.parts import Cluster, Fabric, Host
from holmes.cluster.topology.tables import duration, ranges
from holmes.cluster.topology.topology import Topology

_COLOURS = {"infiniband": "#2166ac", "roce_v2": "#c2512b", "roce_v1": "#d98c3f", "ethernet": "#4d8b4a"}
_TEXT = {"infiniband": "InfiniBand", "roce_v2": "RoCE v2", "roce_v1": "RoCE v1", "ethernet": "Ethernet"}
_GREY, _FAULT = "#666666", "#b00020"
_EACH_HOST = 6  # of a cluster with more, one box stands for all
_MOST_NOTES = 12
# Sizes in inches.
_HOST_WIDTH, _HOST_HEIGHT, _GAP, _PAD, _LANE, _TITLE = 1.35, 0.85, 0.25, 0.25, 0.55, 0.38
_MARGIN = 0.45
_LEAST_WIDTH = 3.3  # of a cluster: its title and its fabrics' labels fit
_MOST_WIDTH = 15.5  # of the picture: more clusters go on in a new row
_SMALL, _PLAIN = 7.5, 9


def draw_topology(topology: Topology, path: str | Path) -> None:
    """Writes .svg, .png or .pdf. Raises ValueError for another ending, or where matplotlib is missing."""
    path = Path(path)
    files.check_picture(path)
    from matplotlib.figure import Figure

    picture = _Picture(topology)
    figure = Figure(figsize=(picture.width, picture.height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, picture.width), ylim=(picture.height, 0))  # downwards
    axes.axis("off")
    picture.draw(axes)
    figure.savefig(path, dpi=160, facecolor="white")


@dataclass
class _Box:
    """One host, or the hosts of a large cluster, at x; `drops` counts the lines that leave it so far."""

    hosts: list[Host]
    x: float
    width: float
    drops: int = 0


@dataclass
class _Frame:
    """A cluster's place: its row, x, width and boxes, and the lanes of the fabrics that only it has."""

    cluster: Cluster
    row: int
    x: float
    width: float
    boxes: list[_Box]
    lanes: list[list[Fabric]]


class _Picture:
    """Where everything is; all sizes in inches, from the top left."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.faulty = {name for finding in topology.findings for name in finding.host.split(", ")}
        self.frames: list[_Frame] = []
        x, row, right = _MARGIN, 0, 0.0
        for cluster in topology.clusters:
            frame = self._frame(cluster, x, row)
            if x > _MARGIN and x + frame.width > _MOST_WIDTH:
                row += 1
                frame = self._frame(cluster, _MARGIN, row)
            self.frames.append(frame)
            x = frame.x + frame.width + _PAD
            right = max(right, x)
        self.width = max(right, 7.0)
        self.rows = row + 1
        inside = {fabric.name for frame in self.frames for lane in frame.lanes for fabric in lane}
        self.outer = rails_together([fabric for fabric in topology.fabrics if fabric.name not in inside])
        self.frame_height = _TITLE + _HOST_HEIGHT + _PAD + _LANE * max(len(frame.lanes) for frame in self.frames)
        self.row_height = self.frame_height + _LANE * (len(self.outer) + 0.6)
        lines = int(self.width * 13)
        self.notes = [textwrap.wrap(f"! {finding}", lines) for finding in topology.findings[:_MOST_NOTES]]
        if len(topology.findings) > _MOST_NOTES:
            self.notes.append([f"and {len(topology.findings) - _MOST_NOTES} more findings"])
        self.notes_top = self._top(self.rows)
        self.height = self.notes_top + 0.16 * sum(map(len, self.notes)) + (0.2 if self.notes else 0.05)

    def _top(self, row: int) -> float:
        return _PAD + _TITLE + row * self.row_height

    def _frame(self, cluster: Cluster, x: float, row: int) -> _Frame:
        hosts = [self.topology.host_named(name) for name in cluster.hosts]
        each = [[host] for host in hosts] if len(hosts) <= _EACH_HOST else [hosts]
        box_width = _HOST_WIDTH if len(each) > 1 else 1.6 * _HOST_WIDTH
        content = len(each) * (box_width + _GAP) - _GAP
        width = max(content + 2 * _PAD, _LEAST_WIDTH)
        start = x + (width - content) / 2
        boxes = [_Box(hosts, start + i * (box_width + _GAP), box_width) for i, hosts in enumerate(each)]
        own = {host.host_id for host in hosts}
        lanes = rails_together([fabric for fabric in self.topology.fabrics if own.issuperset(fabric.ports)])
        return _Frame(cluster, row, x, width, boxes, lanes)

    def draw(self, axes: Any) -> None:
        """Draws everything."""
        topology = self.topology
        counts = {"host": len(topology.hosts), "rank": topology.world_size, "cluster": len(topology.clusters)}
        title = ", ".join(f"{count} {thing}{'s' * (count > 1)}" for thing, count in counts.items())
        axes.text(_MARGIN, _PAD + 0.05, title, fontsize=12, weight="bold", va="center")
        for frame in self.frames:
            self._cluster(axes, frame)
        for depth, lane in enumerate(self.outer):
            self._outer_lane(axes, lane, depth)
        y = self.notes_top + 0.05
        for lines in self.notes:
            axes.text(_MARGIN, y, "\n".join(lines), fontsize=_SMALL, color=_FAULT, va="top", linespacing=1.3)
            y += 0.16 * len(lines)

    def _cluster(self, axes: Any, frame: _Frame) -> None:
        cluster, top = frame.cluster, self._top(frame.row)
        colour = _COLOURS.get(cluster.nic_class or "", _GREY)
        _round_box(axes, frame.x, top, frame.width, self.frame_height, fc="none", ec=colour, lw=1.2)
        _round_box(axes, frame.x, top, frame.width, self.frame_height, fc=colour, ec="none", alpha=0.06)
        size = f"{len(cluster.hosts)} host{'s' * (len(cluster.hosts) > 1)}, {len(cluster.ranks)} ranks"
        y = top + _TITLE / 2
        axes.text(frame.x + 0.12, y, cluster.name, fontsize=_PLAIN, weight="bold", va="center", color=colour)
        axes.text(frame.x + frame.width - 0.12, y, size, fontsize=_SMALL, va="center", ha="right", color=_GREY)
        for depth, lane in enumerate(frame.lanes):
            y = self._lane_y(frame, depth)
            ends = [self._drop(axes, frame, box, lane[0], y) for box in frame.boxes if _joins(lane[0], box)]
            if len(ends) == 1:  # one box for all hosts
                ends = [frame.boxes[0].x, frame.boxes[0].x + frame.boxes[0].width]
            _line(axes, ends, y, lane)
            _write_label(axes, frame.x + 0.12, y, self.topology, lane)
        for box in frame.boxes:
            self._loose_nics(axes, frame, box)
            self._host(axes, box, top + _TITLE)

    def _outer_lane(self, axes: Any, lane: list[Fabric], depth: int) -> None:
        """A network of several clusters: a line below each row of clusters, joined at the left."""
        fabric, colour = lane[0], _COLOURS.get(lane[0].nic_class, _GREY)
        trunk = _MARGIN - 0.12 - 0.06 * depth
        rows = []
        for row in range(self.rows):
            y = self._top(row) + self.frame_height + _LANE * (depth + 0.75)
            ends = []
            for frame in (frame for frame in self.frames if frame.row == row):
                boxes = [box for box in frame.boxes if _joins(fabric, box)]
                same = next((i for i, own in enumerate(frame.lanes) if boxes and _same_nics(own[0], fabric)), None)
                if same is not None:  # the part of this network that the cluster is: one line leaves it
                    inner_y, x = self._lane_y(frame, same), frame.x + frame.width - 0.18
                    axes.plot([frame.boxes[-1].x, x], [inner_y, inner_y], color=colour, lw=2.2, zorder=2)
                    axes.plot([x, x], [inner_y, y], color=colour, lw=1.3, zorder=2)
                    axes.plot([x], [y], "o", color=colour, ms=4, zorder=3)
                    ends.append(x)
                else:
                    ends += [self._drop(axes, frame, box, fabric, y) for box in boxes]
            if ends:
                rows.append(y)
                _line(axes, [*ends, trunk] if self.rows > 1 else ends, y, lane)
        if len(rows) > 1:
            axes.plot([trunk, trunk], [rows[0], rows[-1]], color=colour, lw=2.2, zorder=2)
        if rows:
            _write_label(axes, _MARGIN, rows[-1], self.topology, lane)

    def _lane_y(self, frame: _Frame, depth: int) -> float:
        return self._top(frame.row) + _TITLE + _HOST_HEIGHT + _LANE * (depth + 0.75)

    def _drop(self, axes: Any, frame: _Frame, box: _Box, fabric: Fabric, y: float) -> float:
        """The line from a box down to a fabric, with the NIC's name; returns where it is."""
        nic = fabric.ports[next(host.host_id for host in box.hosts if host.host_id in fabric.ports)]
        x, bottom = self._next_x(box), self._top(frame.row) + _TITLE + _HOST_HEIGHT
        colour = _COLOURS.get(fabric.nic_class, _GREY)
        axes.plot([x, x], [bottom, y], color=colour, lw=1.3, zorder=2, solid_capstyle="butt")
        axes.plot([x], [y], "o", color=colour, ms=4, zorder=3)
        _write_nic(axes, x, bottom, nic, colour, box.drops)
        return x

    def _loose_nics(self, axes: Any, frame: _Frame, box: _Box) -> None:
        """The NICs of a host that are in no fabric, as ends that hang in the air."""
        bottom = self._top(frame.row) + _TITLE + _HOST_HEIGHT
        for port in box.hosts[0].ports if len(box.hosts) == 1 else ():
            if any(fabric.ports.get(box.hosts[0].host_id) == port.name for fabric in self.topology.fabrics):
                continue
            x = self._next_x(box)
            axes.plot([x, x], [bottom, bottom + 0.22], color=_GREY, lw=1.1, ls=":", zorder=2)
            axes.plot([x], [bottom + 0.24], "x", color=_GREY, ms=4, zorder=3)
            _write_nic(axes, x, bottom, port.name, _GREY, box.drops)

    def _next_x(self, box: _Box) -> float:
        """Where the next line leaves a box; there is room for as many as it may have."""
        box.drops += 1
        room = len(self.outer) + max(len(frame.lanes) for frame in self.frames) + 2
        return box.x + box.width * (box.drops - 0.5) / max(room, 3)

    def _host(self, axes: Any, box: _Box, y: float) -> None:
        bad = any(host.name in self.faulty for host in box.hosts)
        edge: dict[str, Any] = {"ec": _FAULT if bad else "#333333", "lw": 1.6 if bad else 0.9}
        for offset in (0.1, 0.05, 0.0) if len(box.hosts) > 1 else (0.0,):
            _round_box(axes, box.x + offset, y - offset, box.width, _HOST_HEIGHT, fc="white", zorder=3, **edge)
        first, last = box.hosts[0], box.hosts[-1]
        name = first.name if first is last else f"{first.name} .. {last.name}"
        ranks = [rank for host in box.hosts for rank in host.ranks]
        lines = [("! " if bad else "") + _short(name, box.width)]
        lines.append(_short(f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}", box.width))
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


def _round_box(axes: Any, x: float, y: float, width: float, height: float, **style: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.06", **style))


def _write_nic(axes: Any, x: float, bottom: float, name: str, colour: str, place: int) -> None:
    """Neighbours' names at two heights, so that long ones do not meet."""
    axes.text(x + 0.03, bottom + 0.09 + 0.1 * (place % 2), name, fontsize=5.5, color=colour, va="center", zorder=5)


def _line(axes: Any, ends: list[float], y: float, lane: list[Fabric]) -> None:
    colour = _COLOURS.get(lane[0].nic_class, _GREY)
    width = 3.5 if len(lane) > 1 else 2.2
    axes.plot([min(ends), max(ends)], [y, y], color=colour, lw=width, zorder=2, solid_capstyle="round")


def _write_label(axes: Any, x: float, y: float, topology: Topology, lane: list[Fabric]) -> None:
    colour = _COLOURS.get(lane[0].nic_class, _GREY)
    ground = {"fc": "white", "ec": "none", "pad": 0.6, "alpha": 0.85}
    axes.text(x, y + 0.14, _label(topology, lane), fontsize=_SMALL, color=colour, va="center", zorder=5, bbox=ground)


def _joins(fabric: Fabric, box: _Box) -> bool:
    return any(host.host_id in fabric.ports for host in box.hosts)


def _same_nics(part: Fabric, whole: Fabric) -> bool:
    return all(whole.ports.get(host_id) == nic for host_id, nic in part.ports.items())


def _label(topology: Topology, fabrics: list[Fabric]) -> str:
    fabric = fabrics[0]
    count = f"{len(fabrics)} x " if len(fabrics) > 1 else ""
    where = fabric.name.removeprefix(fabric.nic_class).strip() if len(fabrics) == 1 else ""
    text = f"{count}{_TEXT.get(fabric.nic_class, fabric.nic_class)} {where}".rstrip()
    rates = []
    if fabric.measured_gbps is not None:
        line = "" if fabric.speed_gbps is None else f" of {fabric.speed_gbps:g}"
        least = "at least " if fabric.host_limited else ""
        rates.append(f"{least}{fabric.measured_gbps:g}{line} Gbit/s")
    elif fabric.speed_gbps is not None:
        rates.append(f"line rate {fabric.speed_gbps:g} Gbit/s")
    if fabric.latency_s is not None:
        rates.append(duration(fabric.latency_s).replace("us", "\N{MICRO SIGN}s"))
    links = [link for link in topology.links if link.fabric == fabric.name and link.is_shared]
    if links:
        rates.append(f"shared: {min(link.aggregate_gbps for link in links):g} Gbit/s in all between two clusters")
    return ", ".join([text, *rates])


def _short(text: str, width: float) -> str:
    """What fits into a box of this width, about 12 letters an inch."""
    most = int(width * 12.5)
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"
