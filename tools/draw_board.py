#!/usr/bin/env python3
"""Draws the Grafana board's panels with its own queries to a running Prometheus, where there is no Grafana.

usage: tools/draw_board.py OUTPUT.png [--prometheus http://127.0.0.1:9090] [--minutes 2]

How docs/board.png was made: a job on this machine with HOLMES_METRICS_PORT=9400 and a prometheus that scrapes it
(examples/monitoring/prometheus.yml).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

BOARD = Path(__file__).parent.parent / "examples" / "monitoring" / "grafana-board.json"
UNITS = {"bps": ("Gbit/s", 1e-9), "s": ("s", 1), "ops": ("1/s", 1), "pps": ("1/s", 1), "none": ("", 1)}


def ask(prometheus: str, expression: str, minutes: float) -> list[dict[str, Any]]:
    """The series of a query over the last minutes."""
    query = re.sub(r"\$__rate_interval", "20s", re.sub(r"\$(rank|group|nic)\b", ".*", expression))
    now = time.time()
    form = {"query": query, "start": now - 60 * minutes, "end": now, "step": 1}
    address = f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(form)}"
    with urllib.request.urlopen(address, timeout=10) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def main() -> int:
    """Writes the picture; returns 1 where a panel has no series."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=2)
    arguments = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = json.loads(BOARD.read_text())["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = pyplot.figure(figsize=(14, rows * 0.42))
    grid = figure.add_gridspec(rows, 24, hspace=6, wspace=6, left=0.05, right=0.985, top=0.97, bottom=0.035)
    empty = []
    for panel in panels:
        place = panel["gridPos"]
        axis = figure.add_subplot(grid[place["y"] : place["y"] + place["h"] - 1, place["x"] : place["x"] + place["w"]])
        unit, factor = UNITS[panel["fieldConfig"]["defaults"]["unit"]]
        axis.set_title(panel["title"] + (f" ({unit})" if unit else ""), loc="left", fontsize=10)
        found = [(t, s) for t in panel["targets"] for s in ask(arguments.prometheus, t["expr"], arguments.minutes)]
        if not found:
            empty.append(panel["title"])
        if panel["type"] == "stat":
            text = f"{float(found[0][1]['values'][-1][1]) * factor:.4g} {unit}" if found else "no data"
            axis.text(0.5, 0.45, text, ha="center", va="center", fontsize=22, color="#2f7d4f")
            axis.set_axis_off()
            continue
        for target, series in found:
            label = re.sub(r"\{\{(\w+)\}\}", lambda m, s=series: s["metric"].get(m[1], ""), target["legendFormat"])
            points = [(float(at) - time.time(), float(value) * factor) for at, value in series["values"]]
            axis.plot([at for at, _ in points], [value for _, value in points], lw=1.2, label=label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=6, ncols=3, loc="upper left", frameon=False)
    figure.savefig(arguments.output, dpi=75)
    if empty:
        print(f"no series for {', '.join(empty)}", file=sys.stderr)
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
