"""Output: nccl-tests' columns, one line a measurement, and JSON that states hardware, versions and command."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from holmes.tools.bench.measurement import Measurement
from holmes.tools.bench.operations import Case
from holmes.words import count
from holmes_comm.errors import UsageError

# Heading, unit and width. `path`: what carries the bytes, shared memory or TCP.
_COLUMNS = (
    ("size", "(B)", 9),
    ("peer", "", 6),
    ("path", "", 4),
    ("time", "(us)", 9),
    ("p99", "(us)", 9),
    ("algbw", "(GB/s)", 6),
    ("busbw", "(GB/s)", 6),
    ("#wrong", "", 6),
    ("cpu", "(cores)", 7),
    ("B/cpu", "(GB/s)", 6),
    ("foreign", "(cores)", 7),
)
_RATIO_WIDTH = 8
#: Left out, in this order, where lines would be wider than the terminal: the JSON has them.
_SPARE = ("foreign", "B/cpu", "algbw", "p99", "cpu")


class Table:
    """The lines of a run: one for each measurement, no wider than `width` columns where that can be (None: any).

    `paths`: what carries each peer's bytes; `references`: the peers that have a column of ratios.
    """

    def __init__(self, paths: Mapping[str, str], references: Sequence[str], width: int | None = None) -> None:
        wide = {"peer": max(map(len, paths), default=0), "path": max(map(len, paths.values()), default=0)}
        columns = [(name, unit, max(least, wide.get(name, 0))) for name, unit, least in _COLUMNS]
        columns += [(f"/{name}", "", max(_RATIO_WIDTH, len(name) + 1)) for name in references]
        for spare in _SPARE:
            if width is not None and sum(cells + 1 for _, _, cells in columns) > width:
                columns = [column for column in columns if column[0] != spare]
        self._columns = columns
        self._paths = paths
        self._references = references

    def header(self, case: Case) -> str:
        """Returns the heading of one operation's lines."""
        what = [case.operation.name, count(case.ranks, "rank")]
        what += [case.dtype.name] if case.operation.has_data else []
        what += [case.op] if case.operation.reduces else []
        names = " ".join(f"{name:>{width}}" for name, _, width in self._columns)
        units = " ".join(f"{unit:>{width}}" for _, unit, width in self._columns)
        return f"\n# {', '.join(what)}\n#{names}\n#{units}"

    def line(self, measurement: Measurement) -> str:
        """Returns one measurement's line."""
        cells = self._cells(measurement)
        return " " + " ".join(f"{cells.get(name, '-'):>{width}}" for name, _, width in self._columns)

    def _cells(self, measurement: Measurement) -> dict[str, str]:
        cells = {
            "size": str(measurement.case.size_bytes),
            "peer": measurement.peer,
            "path": self._paths[measurement.peer],
            "time": _microseconds(measurement.time_s),
            "algbw": f"{measurement.algorithm_gb_per_s:.3f}",
            "busbw": f"{measurement.bus_gb_per_s:.3f}",
        }
        if (p99_s := measurement.p99_s) is not None:
            cells["p99"] = _microseconds(p99_s)
        for name, value, form in (
            ("#wrong", measurement.wrong_elements, "d"),
            ("cpu", measurement.cores, ".2f"),
            ("B/cpu", measurement.gb_per_core_s, ".3f"),
            ("foreign", measurement.foreign_cores, ".2f"),
        ):
            if value is not None:
                cells[name] = format(value, form)
        for name, ratio in measurement.ratios.items():
            # Not of one library against another alone: of two ways, too.
            is_other_way = self._paths[name] != self._paths[measurement.peer]
            cells[f"/{name}"] = f"{ratio:.2f}x{'*' if is_other_way else ''}"
        return cells

    def footnotes(self) -> list[str]:
        """Returns what a mark in a line means: one line for each pair of peers that go different ways."""
        return [
            f"# * /{reference}: {peer} over {path} against {reference} over {self._paths[reference]}"
            for reference in self._references
            for peer, path in self._paths.items()
            if reference in self._paths and path != self._paths[reference]
        ]


def _microseconds(time_s: float) -> str:
    return f"{time_s * 1e6:.{1 if time_s < 1 else 0}f}"


def row(measurement: Measurement) -> dict[str, Any]:
    """Returns one measurement for the JSON output."""
    case, p50_s, p99_s = measurement.case, measurement.p50_s, measurement.p99_s
    return {
        "operation": case.operation.name,
        "peer": measurement.peer,
        "size_bytes": case.size_bytes,
        "count": case.count,
        "dtype": case.dtype.name,
        "op": case.op if case.operation.reduces else None,
        "time_us": measurement.time_s * 1e6,
        "p50_us": None if p50_s is None else p50_s * 1e6,
        "p99_us": None if p99_s is None else p99_s * 1e6,
        "algorithm_gb_per_s": measurement.algorithm_gb_per_s,
        "bus_gb_per_s": measurement.bus_gb_per_s,
        "wrong_elements": measurement.wrong_elements,
        "cores": measurement.cores,
        "gb_per_core_s": measurement.gb_per_core_s,
        "foreign_cores": measurement.foreign_cores,
        "ratios": dict(measurement.ratios),
        "calls": measurement.calls,
        "round_times_us": [time_s * 1e6 for time_s in measurement.round_times_s],
    }


def _hardware() -> dict[str, Any]:
    """Returns the processor, the usable cores and the memory of this machine; no names that identify it."""
    with open("/proc/cpuinfo") as lines:
        model = next((text.split(":", 1)[1].strip() for text in lines if text.startswith("model name")), None)
    return {
        "processor": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release().split("-")[0],
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ["holmes-comm", "numpy", "torch", "mpi4py"]:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def document(
    command: str, settings: dict[str, Any], ranks: int, peers: dict[str, Any], measurements: Sequence[Measurement]
) -> dict[str, Any]:
    """Returns the whole JSON output: the facts a result must state, then one row for each measurement."""
    return {
        **facts(command, settings),
        "ranks": ranks,
        "peers": peers,
        "rows": [row(measurement) for measurement in measurements],
    }


def compute_document(command: str, settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the JSON output of `holmes bench compute`."""
    return {"kind": "holmes bench compute", "version": 1, **facts(command, settings), "rows": list(rows)}


def facts(command: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns what every result must state: date, command, hardware, versions and settings."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": command,
        "hardware": _hardware(),
        "versions": _versions(),
        "settings": settings,
    }


def draw(path: Path, document: dict[str, Any]) -> None:
    """Writes a picture of the JSON output, in the format that the suffix names; leaves out operations without sizes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in document["rows"] if row["size_bytes"] > 0]
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    if not operations:
        raise UsageError("there is nothing to draw: no operation with sizes was measured")
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    figure, axes = pyplot.subplots(
        len(operations), 2, figsize=(11, 3.2 * len(operations) + 0.6), squeeze=False, constrained_layout=True
    )
    quantities = [("bus_gb_per_s", "bus bandwidth (GB/s)"), ("time_us", "time of a call (us)")]
    for operation, line in zip(operations, axes, strict=True):
        for axis, (key, label) in zip(line, quantities, strict=True):
            for peer in peers:
                points = [row for row in rows if (row["operation"], row["peer"]) == (operation, peer)]
                axis.plot([row["size_bytes"] for row in points], [row[key] for row in points], "o-", ms=3, label=peer)
            axis.set(xscale="log", yscale="log", xlabel="size (bytes)", ylabel=label)
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.3)
            axis.set_title(operation, loc="left")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(peers), frameon=False)
    hardware = document["hardware"]
    figure.suptitle(
        f"{count(document['ranks'], 'rank')}, {hardware['processor']}, {hardware['cores']} cores, {document['date']}"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
