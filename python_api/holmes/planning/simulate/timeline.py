"""The timeline of a simulated step: as Chrome trace (chrome://tracing, Perfetto) and as picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from holmes.planning.simulate.engine import Task
from holmes.planning.simulate.result import Result

_COLORS: Mapping[str, str] = {
    "forward": "#6baed6",
    "backward": "#2171b5",
    "weights": "#9ecae1",
    "optimizer": "#31a354",
    "p2p": "#fd8d3c",
    "gather": "#9e9ac8",
    "reduce": "#756bb1",
    "embedding": "#e7298a",
}


def lane_of(task: Task) -> str:
    """Name of the row a task is drawn in: its device, or its channel."""
    if task.device is not None:
        return task.device
    channel = task.channel
    if isinstance(channel, tuple):
        kind, *rest = channel
        before = ""
        if kind == "turn":  # of a pipeline before the one that is told of
            before = f", turn {rest[0]}"
            kind, *rest = rest[1]
        names = {"F": "activations", "B": "gradients"}
        return {
            "data": f"stage {rest[0]} data parallel",
            "p2p": f"stage {rest[-1]} {names.get(str(rest[0]), '')}{before}",
            "embedding": f"embedding {rest[0]}",
        }.get(str(kind), str(channel))
    return str(channel)


def chrome_trace(result: Result) -> dict[str, Any]:
    """The trace as a JSON object; times in microseconds, a row for each device and each channel of transfers."""
    lanes = {lane: number for number, lane in enumerate(_lanes(result.tasks))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": lane}}
        for lane, number in lanes.items()
    ]
    events += [
        {
            "ph": "X",
            "name": task.label or task.kind,
            "cat": task.kind,
            "pid": 0,
            "tid": lanes[lane_of(task)],
            "ts": task.start_s * 1e6,
            "dur": (task.end_s - task.start_s) * 1e6,
            "args": {"bytes": task.size_bytes, "links": sorted(task.usage)},
        }
        for task in result.tasks
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(result: Result, path: str | Path) -> None:
    """Writes the Chrome trace as JSON."""
    Path(path).write_text(json.dumps(chrome_trace(result)) + "\n")


def draw(result: Result, path: str | Path, title: str = "") -> None:
    """Writes a picture in the format that the suffix names. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    lanes = _lanes([task for task in result.tasks if task.end_s > task.start_s])
    figure, axis = pyplot.subplots(figsize=(12, 0.45 * len(lanes) + 1.6), constrained_layout=True)
    kinds = [kind for kind in _COLORS if any(task.kind == kind and task.end_s > task.start_s for task in result.tasks)]
    for row, lane in enumerate(lanes):
        for kind in kinds:
            bars = [
                (task.start_s, task.end_s - task.start_s)
                for task in result.tasks
                if task.kind == kind and lane_of(task) == lane
            ]
            axis.broken_barh(bars, (row - 0.4, 0.8), color=_COLORS[kind], edgecolor="white", linewidth=0.2)
    axis.set_yticks(range(len(lanes)), lanes)
    axis.invert_yaxis()
    axis.set(xlabel="seconds", xlim=(0, result.step_s))
    axis.set_title(title or f"step {result.step_s:.4g} s, bubble {result.bubble_share:.1%}", loc="left")
    figure.legend(
        handles=[Patch(color=_COLORS[kind], label=kind) for kind in kinds],
        loc="outside lower center",
        ncols=len(kinds),
        frameon=False,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _lanes(tasks: Iterable[Task]) -> list[str]:
    return sorted({lane_of(task) for task in tasks}, key=lambda lane: (lane.startswith("embedding"), lane))
