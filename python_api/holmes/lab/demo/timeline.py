"""Timeline: a picture of one step, a lane per rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holmes.lab.demo.runs import Run

COLORS = {
    "forward": "#4c78a8",
    "backward": "#72a0d0",
    "optimizer": "#54a24b",
    "pipeline wait": "#eeca3b",
    "data parallel": "#e45756",
}


def draw_timeline(path: Path, gloo: Run, ours: Run) -> None:
    """Writes a PNG: both runs on one time scale, and the second one again on its own."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(3, 1, figsize=(12, 8.5), constrained_layout=True)
    whole = _length_s(gloo)
    panels = [(gloo, whole, gloo.title), (ours, whole, ours.title), (ours, _length_s(ours), f"{ours.title}, enlarged")]
    for axis, (run, length_s, title) in zip(axes, panels, strict=True):
        _draw(axis, run)
        axis.set_xlim(0, 1050 * length_s)
        axis.set_title(f"{title}: {_lengths(run)}", loc="left")
        axis.set_xlabel("ms")
    patches = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(COLORS), frameon=False)
    figure.suptitle("One training step; upper half of a lane: the rank's own time, lower half: data-parallel traffic")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw(axis: Any, run: Run) -> None:
    start = _start_s(run)
    ends = sorted(run.ends, key=lambda end: end["rank"])
    for end in ends:
        for span in end["spans"]:
            if span["kind"] in COLORS:
                below = span["kind"] == "data parallel"
                bar = [(1000 * (span["start_s"] - start), 1000 * (span["end_s"] - span["start_s"]))]
                lane = (end["rank"] + (0.0 if below else -0.36), 0.36)
                axis.broken_barh(bar, lane, facecolors=COLORS[span["kind"]], edgecolor="white", linewidth=0.4)
    axis.set_yticks([end["rank"] for end in ends], [_label(run, end) for end in ends])
    axis.set_ylim(len(ends) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)


def _label(run: Run, end: dict[str, Any]) -> str:
    node = f", {end['node']}" if end["node"] else ""
    return f"rank {end['rank']}{node}"


def _lengths(run: Run) -> str:
    """Of the step in the picture, and of the run's, which it is one of."""
    return f"this step {1000 * _length_s(run):.0f} ms, median {1000 * run.step_s():.0f} ms"


def _start_s(run: Run) -> float:
    return float(min(span["start_s"] for end in run.ends for span in end["spans"]))


def _length_s(run: Run) -> float:
    return float(max(span["end_s"] for end in run.ends for span in end["spans"])) - _start_s(run)
