"""Picture of a result: bus bandwidth and time of a call against size, a line for each peer, a row per operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holmes.tools.bench.peer import PeerError


def check_plotting() -> None:
    """Raises PeerError where matplotlib is missing: before the measurement, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PeerError(f"--plot needs matplotlib ({error}); pip install matplotlib") from error


def draw(path: Path, document: dict[str, Any]) -> None:
    """Writes a picture of the JSON output, in the format that the suffix names; leaves out operations without sizes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in document["rows"] if row["size_bytes"] > 0]
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    if not operations:
        raise ValueError("there is nothing to draw: no operation with sizes was measured")
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
