"""Draws docs/pictures again, each from what the command really says on this machine.

    .venv/bin/python tools/make_pictures.py               # all
    .venv/bin/python tools/make_pictures.py top nics      # these

Terminals are SVG: `top` and `topology` a job on emulated nodes, `nics` a recorded machine of tests/fixtures. PNG:
`report`, a page in Chromium; `board`, the Grafana board's panels drawn by matplotlib from what Debian's Prometheus
answers to their queries while it scrapes a job of two ranks. Look at each before it is committed.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from holmes.lab.fake_sysfs import write_sysfs
from holmes.lab.testbed import Testbed, TestbedSession

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
HOLMES = [sys.executable, "-m", "holmes"]
#: Rich's own window with a font that every machine has: a picture in a page may load nothing from elsewhere.
WINDOW = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font: {char_height}px/{line_height}px monospace; white-space: pre }}
.{unique_id}-title {{ font: bold 18px monospace }}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
{chrome}<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""
WIDTH = 88
AS_IN_A_TERMINAL = {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
JOB = """
import os, sys, time
import holmes, holmes_comm.torch_backend
import torch, torch.distributed as dist

dist.init_process_group("holmes")
groups = holmes.process_groups(holmes.make_plan(model_layers=4, pipeline=2))
print("trains", flush=True)
gradients, activations, rank = torch.ones(200_000), torch.ones(20_000), dist.get_rank()
while True:
    if rank == 3 and os.path.exists(sys.argv[1]):
        time.sleep(3600)  # a data loader that waits
    dist.all_reduce(gradients, group=groups.dp)
    if dist.get_group_rank(groups.pp, rank) == 0:
        dist.send(activations, group=groups.pp, group_dst=1)
    else:
        dist.recv(activations, group=groups.pp, group_src=0)
    time.sleep(0.01)
"""


def window(name: str, command: str, printed: str) -> None:
    """The picture of a terminal in which `command` printed this."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.from_ansi(printed.rstrip()), soft_wrap=True)
    text = console.export_svg(title=command, code_format=WINDOW, unique_id=name)
    (PICTURES / f"{name}.svg").write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def said(arguments: Sequence[str]) -> str:
    """What `holmes` prints to a terminal."""
    env = {**os.environ, **AS_IN_A_TERMINAL}
    return subprocess.run([*HOLMES, *arguments], env=env, check=True, capture_output=True, text=True).stdout


def said_on(session: TestbedSession, node: str, arguments: Sequence[str]) -> str:
    """The same on an emulated node."""
    asked = session.spawn(node, [*HOLMES, *arguments], env=AS_IN_A_TERMINAL)
    code, printed = asked.wait(120), "\n".join(asked.lines)
    if code != 0:
        raise RuntimeError(f"holmes {' '.join(arguments)} ended with {code}:\n{printed}")
    return printed


def topology_of(session: TestbedSession, path: Path) -> None:
    """Saves what `holmes topology` finds on the emulated nodes."""
    result = session.launch([*HOLMES, "topology", "--save", str(path)]).wait(120)
    if result.returncode != 0:
        raise RuntimeError(f"holmes topology ended with {result.returncode}: {result.outputs}")


def top(folder: Path) -> None:
    """Two clusters of two, training; then rank 3 has stopped, so that the others wait."""
    (folder / "job.py").write_text(JOB)
    stop = folder / "stop"
    pages = {"HOLMES_METRICS_PORT": "9400", "HOLMES_METRICS_ADDRESS": "0.0.0.0"}
    with Testbed("two-clusters").session() as session:
        job = session.launch([sys.executable, str(folder / "job.py"), str(stop)], env=pages)
        for process in job.processes:
            process.wait_for_line("trains", 60)
        time.sleep(4)
        names = [node.name for node in session.spec.nodes]
        arguments = ["top", *(f"{name}:9400" for name in names), "--once"]
        window("top", f"holmes {' '.join(arguments)}", said_on(session, names[0], arguments))
        stop.touch()
        time.sleep(4)
        window("top-waits", f"holmes {' '.join(arguments)}", said_on(session, names[0], arguments))
        job.stop()


def nics(folder: Path) -> None:
    """A machine with eight GPUs and InfiniBand, as it was recorded."""
    described = yaml.safe_load((ROOT / "tests" / "fixtures" / "machines" / "infiniband8.yaml").read_text())
    root = write_sysfs(folder / "sysfs", described)
    window("nics-matrix", "holmes nics --matrix", said(["nics", "--matrix", "--sysfs-root", str(root)]))


def topology(folder: Path) -> None:
    """Four hosts, one of which has a NIC at a tenth of its rate."""
    with Testbed("one-cluster").session() as session:
        session.set_rate("a2", "ib0", 0.1)
        topology_of(session, folder / "topology.yaml")
    printed = said(["topology", str(folder / "topology.yaml"), "--matrix"])
    window("topology-matrix", "holmes topology topology.yaml --matrix", printed)


def report(folder: Path) -> None:
    """Two clusters, a plan for them, and a measurement of two hosts."""
    found, planned, measured, page = (
        str(folder / name) for name in ("topology.yaml", "plan.yaml", "bench.json", "report.html")
    )
    with Testbed("two-clusters").session() as session:
        topology_of(session, Path(found))
    model = ["--model", "gpt-3.6b", "--gpu", "A100-80GB", "--global-batch", "64"]
    said(["plan", "--topology", found, *model, "--output", planned])
    said(["bench", "all_reduce", "--testbed", "pair", "--sizes", "1K,32K,1M", "--peers", "none", "--json", measured])
    said(["report", page, "--topology", found, "--plan", planned, "--bench", measured])
    shot = folder / "report.png"
    browser = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1100,3600",
    ]
    subprocess.run(
        [
            *browser,
            "--window-size=1100,3600",
            f"--user-data-dir={folder}/browser",
            f"--screenshot={shot}",
            f"file://{page}",
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    save_small(shot, PICTURES / "report.png")


def save_small(source: Path, target: Path) -> None:
    """Without the empty end of the page, in few colours: a quarter of the bytes."""
    from PIL import Image, ImageChops

    with Image.open(source) as shot:
        whole = shot.convert("RGB")
    used = ImageChops.difference(whole, Image.new("RGB", whole.size, "white")).getbbox() or (0, 0, *whole.size)
    whole.crop((0, 0, whole.width, min(whole.height, used[3] + 30))).quantize(64).save(target, optimize=True)


def board(folder: Path) -> None:
    """The board over a minute of a job in which a group fails and a rank waits."""
    sys.path += [str(ROOT / "tests" / "helpers")]
    import ports
    import prometheus

    asked = ports.free_ports(2)
    with ExitStack() as stack:
        stack.enter_context(prometheus.scraped_ranks(asked[0]))
        server = stack.enter_context(prometheus.scraping(folder, asked))
        began = time.time()
        time.sleep(60)
        draw_board(prometheus.board(), server, began, time.time())


def draw_board(described: dict[str, Any], server: Any, began: float, ended: float) -> None:
    """Each panel at its place, with its title, unit and legend."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.gridspec import GridSpec

    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in described["panels"])
    figure = plt.figure(figsize=(13, rows * 0.45), layout="constrained")
    grid = GridSpec(rows, 24, figure=figure)
    for panel in described["panels"]:
        place = panel["gridPos"]
        axes = figure.add_subplot(grid[place["y"] : place["y"] + place["h"], place["x"] : place["x"] + place["w"]])
        axes.set_title(panel["title"], loc="left", fontsize=10, fontweight="bold")
        draw = draw_number if panel["type"] == "stat" else draw_series
        draw(axes, panel, server, began, ended)
    figure.savefig(PICTURES / "board.png", dpi=80)
    plt.close(figure)
    save_small(PICTURES / "board.png", PICTURES / "board.png")


UNITS = {"bps": " bit/s", "pps": "/s", "ops": "/s", "s": " s", "none": ""}


def draw_number(axes: Any, panel: dict[str, Any], server: Any, began: float, ended: float) -> None:
    """A stat panel: its last value."""
    from matplotlib.ticker import EngFormatter

    (target,) = panel["targets"]
    value = float(series_of(target, server, began, ended)[0][1][-1][1])
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.axis("off")
    text = EngFormatter(places=1)(value).strip() if unit != "none" else f"{value:g}"
    axes.text(0.5, 0.45, text + UNITS[unit], ha="center", va="center", fontsize=22, color="#2f7d32")


def draw_series(axes: Any, panel: dict[str, Any], server: Any, began: float, ended: float) -> None:
    """A time series panel: a line for each series."""
    from matplotlib.ticker import EngFormatter

    for target in panel["targets"]:
        for label, points in series_of(target, server, began, ended):
            at = [float(moment) - began for moment, _ in points]
            axes.plot(at, [float(value) for _, value in points], label=label, linewidth=1.2)
    axes.yaxis.set_major_formatter(EngFormatter(unit=UNITS[panel["fieldConfig"]["defaults"]["unit"]].strip()))
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, ended - began)
    axes.set_xlabel("s", fontsize=8, loc="right")
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper left", ncols=2)


def series_of(target: dict[str, Any], server: Any, began: float, ended: float) -> list[tuple[str, list[Any]]]:
    """Legend and points of each series, as Prometheus answers this query of the board."""
    import prometheus

    query = prometheus.filled_in(target["expr"], every_s=1)
    found = server.get("api/v1/query_range", query=query, start=began, end=ended, step=1)["result"]
    if not found:
        raise RuntimeError(f"Prometheus has nothing for {query}")
    return [(prometheus.legend(target["legendFormat"], one["metric"]), one["values"]) for one in found]


DRAWN = {one.__name__: one for one in (top, nics, topology, report, board)}


def main() -> None:
    """Draws what is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*DRAWN, []], default=[], metavar="NAME", help=", ".join(DRAWN))
    PICTURES.mkdir(exist_ok=True)
    for name in parser.parse_args().names or DRAWN:
        with tempfile.TemporaryDirectory() as folder:
            DRAWN[name](Path(folder))
        print(f"drew {name}")


if __name__ == "__main__":
    main()
