"""Output: nccl-tests' columns, one line a measurement, and JSON that states hardware, versions and command."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from holmes.tools.bench.measurement import Measurement
from holmes_comm.errors import UsageError

_COLUMNS = [
    ("size", "(B)", 11),
    ("type", "", 9),
    ("op", "", 8),
    ("peer", "", 22),
    ("time", "(us)", 11),
    ("p99", "(us)", 11),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("#wrong", "", 7),
    ("cpu", "(cores)", 8),
    ("B/cpu", "(GB/s)", 8),
    ("others", "(cores)", 8),
]
_RATIO_WIDTH = 7


def _columns(references: Sequence[str]) -> list[tuple[str, str, int]]:
    """Returns heading, unit and width of every column: one ratio column for each peer of reference."""
    return [*_COLUMNS, *((f"/{name}", "", max(_RATIO_WIDTH, len(name) + 1)) for name in references)]


def header(operation: str, ranks: int, references: Sequence[str]) -> str:
    """Returns the heading of one operation's lines."""
    columns = _columns(references)
    names = " ".join(f"{name:>{width}}" for name, _, width in columns)
    units = " ".join(f"{unit:>{width}}" for _, unit, width in columns)
    return f"\n# {operation}, {ranks} ranks\n#{names}\n#{units}"


def line(measurement: Measurement, references: Sequence[str]) -> str:
    """Returns one measurement's line."""
    case = measurement.case
    efficiency = measurement.gb_per_core_s
    cells = [
        str(case.size_bytes),
        case.dtype.name if case.operation.has_data else "-",
        case.op if case.operation.reduces else "-",
        measurement.peer,
        f"{measurement.time_s * 1e6:.1f}",
        f"{measurement.p99_s * 1e6:.1f}",
        f"{measurement.algorithm_gb_per_s:.3f}",
        f"{measurement.bus_gb_per_s:.3f}",
        str(measurement.wrong_elements),
        f"{measurement.cores:.2f}",
        "-" if efficiency is None else f"{efficiency:.3f}",
        "-" if measurement.foreign_cores is None else f"{measurement.foreign_cores:.2f}",
    ]
    for name in references:
        cells.append(f"{measurement.ratios[name]:.2f}x" if name in measurement.ratios else "-")
    return " " + " ".join(f"{cell:>{width}}" for cell, (_, _, width) in zip(cells, _columns(references), strict=True))


def row(measurement: Measurement) -> dict[str, Any]:
    """Returns one measurement for the JSON output."""
    case = measurement.case
    return {
        "operation": case.operation.name,
        "peer": measurement.peer,
        "size_bytes": case.size_bytes,
        "count": case.count,
        "dtype": case.dtype.name,
        "op": case.op if case.operation.reduces else None,
        "time_us": measurement.time_s * 1e6,
        "p50_us": measurement.p50_s * 1e6,
        "p99_us": measurement.p99_s * 1e6,
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
        f"{document['ranks']} ranks, {hardware['processor']}, {hardware['cores']} cores, {document['date']}"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
