"""`holmes bench --matrix`: every operation and size, in each layout of ranks, against the best of the peers."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from holmes import files
from holmes.tools.bench.launch import find_mpirun, launch
from holmes.tools.bench.operations import OPERATIONS
from holmes.tools.bench.peer import PeerError
from holmes.tools.bench.settings import Output, Settings
from holmes.tools.bench.tables import facts
from holmes.words import count
from holmes_comm.errors import UsageError

#: A peer that is faster by more than this share has won a cell: what quiet runs differ by among themselves.
NOISE = 0.05
#: Sizes in bytes, where none are given.
SIZES = tuple(1 << power for power in (3, 6, 10, 13, 16, 18, 20, 22, 24, 26, 28))

_LOCAL_COMPLETION = "HOLMES_LOCAL_COMPLETION"

#: Runs ranks on the emulated nodes of a spec, as the lab's launch_on_testbed.
OnTestbed = Callable[[Settings, Output, str], int]


@dataclass(frozen=True)
class Layout:
    """Where the ranks are: processes of this machine, or the nodes of a testbed's spec, one rank on each."""

    name: str
    ranks: int
    transport: str
    peers: tuple[str, ...]
    testbed: str | None = None


_TCP_PEERS = ("gloo", "openmpi-tcp", "ucx-tcp")
_SHM_PEERS = ("gloo", "openmpi-shm", "openmpi-shm-nocma", "ucx-shm")
LAYOUTS = {
    layout.name: layout
    for layout in [
        *(Layout(f"tcp-{ranks}", ranks, "tcp", _TCP_PEERS) for ranks in (2, 4, 8)),
        *(Layout(f"shm-{ranks}", ranks, "shm", _SHM_PEERS) for ranks in (2, 4, 8)),
        Layout("links-2", 2, "auto", _TCP_PEERS, "pair"),
        Layout("links-4", 4, "auto", _TCP_PEERS, "four-nodes"),
        Layout("links-8", 8, "auto", _TCP_PEERS, "eight-nodes"),
        Layout("clusters-6", 6, "auto", _TCP_PEERS, "slow-uplink"),
    ]
}


@dataclass
class Cell:
    """One operation and size in one layout. `ratios`: how many times faster than each peer ours is."""

    layout: str
    operation: str
    size_bytes: int
    time_us: float
    ratios: dict[str, float] = field(default_factory=dict)

    @property
    def best_peer(self) -> str:
        """The fastest of the others."""
        return min(self.ratios, key=self.ratios.__getitem__)

    @property
    def ratio(self) -> float:
        """Against the fastest of the others."""
        return self.ratios[self.best_peer]

    @property
    def is_lost(self) -> bool:
        """Whether a peer is faster by more than the noise."""
        return self.ratio < 1 / (1 + NOISE)


def lost_cells(cells: Iterable[Cell]) -> list[Cell]:
    """Returns the lost ones, the worst first."""
    return sorted((cell for cell in cells if cell.is_lost), key=lambda cell: cell.ratio)


Key = tuple[str, str, int]


def choose_layouts(names: str | None) -> list[Layout]:
    """Returns the layouts with these names, separated by commas; all where there is no text. Raises UsageError."""
    chosen = list(LAYOUTS) if names is None else names.split(",")
    for name in chosen:
        if name not in LAYOUTS:
            raise UsageError(f"layout {name!r} is unknown; known are {', '.join(LAYOUTS)}")
    return [LAYOUTS[name] for name in chosen]


class Matrix:
    """The cells that were measured, and what could not be."""

    def __init__(
        self, settings: Settings, peers: Sequence[str], on_testbed: OnTestbed, width: int | None = None
    ) -> None:
        """`settings` say operations, sizes and times, `peers` which of a layout's to take; `width` as in Output."""
        self.cells: dict[Key, Cell] = {}
        self.failures: list[str] = []
        self.is_complete = False
        self._settings = settings
        self._peers = peers
        self._on_testbed = on_testbed
        self._width = width

    def run(self, layouts: Sequence[Layout]) -> None:
        """Measures all, then what was lost once more: a cell counts as lost where it was lost both times.

        Rooted operations of ours end as the peers' do, HOLMES_LOCAL_COMPLETION, unless that variable is set.
        """
        before = os.environ.get(_LOCAL_COMPLETION)
        os.environ.setdefault(_LOCAL_COMPLETION, "1")
        try:
            self._run(layouts)
        finally:
            if before is None:
                del os.environ[_LOCAL_COMPLETION]

    def _run(self, layouts: Sequence[Layout]) -> None:
        runs = [(layout, peers) for layout in layouts for peers in self._runs(layout)]
        for layout, peers in runs:
            self._measure(layout, peers, self._settings)
        for layout, peers in runs:
            again = [cell for cell in self.lost() if cell.layout == layout.name and cell.best_peer in peers]
            for operation in dict.fromkeys(cell.operation for cell in again):
                sizes = tuple(cell.size_bytes for cell in again if cell.operation == operation)
                # A barrier has none, which the settings do not take.
                sizes = sizes if OPERATIONS[operation].has_data else self._settings.sizes
                self._measure(layout, peers, replace(self._settings, operations=(operation,), sizes=sizes))
        self.is_complete = True

    def lost(self) -> list[Cell]:
        """Returns the lost cells, the worst first."""
        return lost_cells(self.cells.values())

    def _runs(self, layout: Layout) -> Iterator[tuple[str, ...]]:
        """Yields the peers of each run: Open MPI starts once in a process, so a run has one of its transports."""
        wanted = [peer for peer in layout.peers if peer in self._peers]
        mpi = [peer for peer in wanted if peer != "gloo"]
        if mpi and find_mpirun() is None:
            self.failures.append(f"{layout.name}: there is no mpirun, so without {', '.join(mpi)}")
            mpi = []
        others = tuple(peer for peer in wanted if peer == "gloo")
        if others or mpi:
            yield (*others, *mpi[:1])
        for peer in mpi[1:]:
            yield (peer,)

    def _measure(self, layout: Layout, peers: tuple[str, ...], wanted: Settings) -> None:
        settings = replace(wanted, transport=layout.transport, peers=peers)
        print(f"\n## {layout.name}: {count(layout.ranks, 'rank')}, beside {', '.join(peers)}", flush=True)
        with tempfile.TemporaryDirectory(prefix="holmes-bench-") as folder:
            path = Path(folder) / "run.json"
            output = Output("", str(path), None, self._width)
            try:
                if layout.testbed is None:
                    status = launch(settings, layout.ranks, output)
                else:
                    status = self._on_testbed(settings, output, layout.testbed)
                reason = f"exit status {status}"
            except PeerError as error:
                status, reason = 1, str(error)
            finally:  # also of what Ctrl-C ended
                rows = files.load(path)["rows"] if path.exists() else []
                self._add(layout, rows)
        if status != 0:
            self.failures.append(f"{layout.name}, {', '.join(peers)}: {reason}, {count(len(rows), 'measurement')}")
            if not rows and len(peers) > 1:  # one that is not usable here must not take the others with it
                self._measure(layout, peers[:1], wanted)

    def _add(self, layout: Layout, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            if row["peer"] != "holmes" or not row["ratios"]:
                continue
            key = (layout.name, row["operation"], row["size_bytes"])
            cell = self.cells.setdefault(key, Cell(*key, row["time_us"]))
            for peer, ratio in row["ratios"].items():
                cell.ratios[peer] = max(ratio, cell.ratios.get(peer, 0.0))

    def report(self) -> list[str]:
        """Returns the lost cells as lines, and how many they are."""
        lost = self.lost()
        lines = [
            f"{'layout':<11} {'operation':<15} {'size (B)':>10} {'time (us)':>11} {'fastest':<18} {'ratio':>6}",
            *(
                f"{cell.layout:<11} {cell.operation:<15} {cell.size_bytes:>10} {cell.time_us:>11.1f} "
                f"{cell.best_peer:<18} {cell.ratio:>5.2f}x"
                for cell in lost
            ),
        ]
        beyond = f"lost by more than {NOISE:.0%}" + (", twice" if self.is_complete else " so far: it was ended early")
        return [*(lines if lost else []), *self.failures, f"# {count(len(self.cells), 'cell')}, {len(lost)} {beyond}"]

    def document(self, command: str) -> dict[str, Any]:
        """Returns all of it for `--json`."""
        return {
            "kind": "holmes bench matrix",
            "version": 1,
            **facts(command, {**asdict(self._settings), "peers": list(self._peers)}),
            "noise": NOISE,
            "local_completion": os.environ.get(_LOCAL_COMPLETION, "1"),
            "complete": self.is_complete,
            "failures": self.failures,
            "cells": [asdict(cell) for cell in self.cells.values()],
        }

    def save(self, command: str, json_path: str | None, plot_path: str | None) -> None:
        """Writes the JSON and the picture, where there is a path."""
        if json_path is not None:
            files.replace(json_path, json.dumps(self.document(command), indent=1) + "\n")
        if plot_path is not None and self.cells:
            draw(Path(plot_path), list(self.cells.values()))


def draw(path: Path, cells: Sequence[Cell]) -> None:
    """Writes a picture in the format that the suffix names: for each layout a map of how many times faster ours is."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layouts = list(dict.fromkeys(cell.layout for cell in cells))
    operations = list(dict.fromkeys(cell.operation for cell in cells))
    columns = min(2, len(layouts))
    lines = math.ceil(len(layouts) / columns)
    figure, axes = pyplot.subplots(
        lines,
        columns,
        figsize=(8.5 * columns, (0.3 * len(operations) + 1.2) * lines),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(layouts) :]:
        axis.set_axis_off()
    for axis, layout in zip(axes.flat, layouts, strict=False):
        own = [cell for cell in cells if cell.layout == layout]
        powers = sorted({_power(cell) for cell in own})
        places = {(operations.index(cell.operation), powers.index(_power(cell))): cell for cell in own}
        colours = [[math.nan] * len(powers) for _ in operations]
        for (line, column), cell in places.items():
            colours[line][column] = math.log2(cell.ratio)
            axis.text(column, line, f"{cell.ratio:.2g}", ha="center", va="center", fontsize=7)
        axis.imshow(colours, cmap="RdYlGn", vmin=-2, vmax=2, aspect="auto")
        axis.set_yticks(range(len(operations)), operations, fontsize=8)
        axis.set_xticks(range(len(powers)), [_name(power) for power in powers], fontsize=8)
        axis.set_title(f"{layout}: times faster than the best of the others", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _power(cell: Cell) -> int:
    """Returns the nearest power of two: where a buffer is cut, a few bytes of the size are missing. -1: no bytes."""
    return round(math.log2(cell.size_bytes)) if cell.size_bytes else -1


def _name(power: int) -> str:
    return "-" if power < 0 else f"{1 << power % 10}{['', 'K', 'M', 'G'][power // 10]}"
