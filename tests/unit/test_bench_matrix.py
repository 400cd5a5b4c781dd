"""`holmes bench --matrix`: what is run in which layout, what counts as lost, what is said of what could not run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holmes.tools.bench import Output, PeerError, Settings
from holmes.tools.bench import matrix as module
from holmes.tools.bench.matrix import LAYOUTS, Matrix, choose_layouts
from holmes_comm.errors import UsageError


class Ranks:
    """In place of processes: writes what is said of each operation's ratio to each peer, in the order of the runs."""

    def __init__(self, ratios):
        self.ratios = ratios  # (operation, peer): ratios, one for each time it is measured
        self.runs = []

    def __call__(self, settings: Settings, ranks: int, output: Output) -> int:
        self.runs.append((settings.transport, ranks, settings.peers, settings.operations, settings.sizes))
        if "ucx-tcp" in settings.peers and ("all_reduce", "ucx-tcp") not in self.ratios:
            raise PeerError("no UCX here")
        rows = [
            {
                "peer": "holmes",
                "operation": operation,
                "size_bytes": size,
                "time_us": 10.0,
                "ratios": {peer: self.ratios[operation, peer].pop(0) for peer in settings.peers},
            }
            for operation in settings.operations
            for size in settings.sizes
        ]
        Path(output.json_path).write_text(json.dumps({"rows": rows}))
        return 0


@pytest.fixture
def ranks(monkeypatch):
    def install(ratios):
        made = Ranks(ratios)
        monkeypatch.setattr(module, "launch", made)
        monkeypatch.setattr(module, "find_mpirun", lambda: "mpirun")
        return made

    return install


def measure(ranks, peers, operations=("all_reduce",)):
    matrix = Matrix(
        Settings(operations, sizes=(1024,), peers=()), peers, lambda *_: pytest.fail("no testbed is asked for")
    )
    matrix.run([LAYOUTS["tcp-4"]])
    return matrix


def test_a_cell_is_lost_where_the_fastest_peer_won_twice(ranks):
    made = ranks(
        {
            ("all_reduce", "gloo"): [3.0],
            ("all_reduce", "openmpi-tcp"): [0.7, 0.8],  # run again beside it alone, as Gloo has lost
            ("broadcast", "gloo"): [0.9, 1.0],
            ("broadcast", "openmpi-tcp"): [2.0, 2.0],
            ("barrier", "gloo"): [1.2],
            ("barrier", "openmpi-tcp"): [0.96],  # within the noise
        }
    )
    made.ratios["all_reduce", "gloo"].append(3.1)
    matrix = measure(made, ("gloo", "openmpi-tcp"), ("all_reduce", "broadcast", "barrier"))
    (lost,) = matrix.lost()
    assert (lost.operation, lost.best_peer, lost.ratio) == ("all_reduce", "openmpi-tcp", 0.8)
    assert [run[3] for run in made.runs] == [("all_reduce", "broadcast", "barrier"), ("all_reduce",), ("broadcast",)]
    assert matrix.report()[-1] == "# 3 cells, 1 lost by more than 5%, twice"
    assert matrix.document("it")["complete"]
    assert "0.80x" in matrix.report()[1]
    assert "openmpi-tcp" in matrix.report()[1]


def test_each_of_open_mpis_transports_has_its_run(ranks):
    made = ranks({("all_reduce", peer): [2.0] for peer in ("gloo", "openmpi-tcp", "ucx-tcp")})
    matrix = measure(made, ("gloo", "openmpi-tcp", "openmpi-shm", "ucx-tcp"))
    assert [run[:3] for run in made.runs] == [("tcp", 4, ("gloo", "openmpi-tcp")), ("tcp", 4, ("ucx-tcp",))]
    assert set(matrix.cells["tcp-4", "all_reduce", 1024].ratios) == {"gloo", "openmpi-tcp", "ucx-tcp"}
    assert matrix.failures == []


def test_what_cannot_be_measured_is_said_and_takes_nothing_with_it(ranks, monkeypatch):
    made = ranks({("all_reduce", "gloo"): [2.0]})
    matrix = measure(made, ("gloo", "ucx-tcp"))
    assert [run[2] for run in made.runs] == [("gloo", "ucx-tcp"), ("gloo",)]
    assert matrix.failures == ["tcp-4, gloo, ucx-tcp: no UCX here, 0 measurements"]
    assert set(matrix.cells["tcp-4", "all_reduce", 1024].ratios) == {"gloo"}
    monkeypatch.setattr(module, "find_mpirun", lambda: None)
    made.ratios["all_reduce", "gloo"].append(2.0)
    assert measure(made, ("gloo", "openmpi-tcp")).failures == ["tcp-4: there is no mpirun, so without openmpi-tcp"]


def test_what_was_ended_early_says_so(ranks, monkeypatch):
    made = ranks({("all_reduce", "gloo"): [0.5]})

    def interrupted(*arguments):
        if made.runs:
            raise KeyboardInterrupt
        return made(*arguments)

    monkeypatch.setattr(module, "launch", interrupted)
    matrix = Matrix(Settings(("all_reduce",), sizes=(1024,), peers=()), ("gloo",), lambda *_: 1)
    with pytest.raises(KeyboardInterrupt):
        matrix.run([LAYOUTS["tcp-4"]])
    assert matrix.report()[-1] == "# 1 cell, 1 lost by more than 5% so far: it was ended early"
    assert not matrix.document("it")["complete"]


def test_layouts_are_named():
    assert choose_layouts(None) == list(LAYOUTS.values())
    assert [layout.ranks for layout in choose_layouts("shm-8,links-2")] == [8, 2]
    with pytest.raises(UsageError, match="layout 'shm-3' is unknown; known are tcp-2, tcp-4"):
        choose_layouts("shm-3")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--matrix", "--ranks", "4"], "--ranks says nothing here: --matrix has layouts of its own"),
        (["--matrix", "--testbed", "pair"], "--testbed says nothing here"),
        (["--layouts", "tcp-2"], "--layouts says nothing here: layouts are those of --matrix"),
        (["--matrix", "--peers", "glo"], "peer 'glo' is unknown; known are gloo"),
        (["--matrix", "--layouts", "x"], "layout 'x' is unknown"),
        (["--matrix", "--json", "-"], "give --json a file"),
    ],
)
def test_options_that_do_not_go_together_are_named(arguments, words):
    run = subprocess.run(
        [sys.executable, "-m", "holmes", "bench", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 2
    assert words in " ".join(run.stderr.split())
    assert "Traceback" not in run.stderr


def test_two_layouts_for_real(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    saved, picture = tmp_path / "matrix.json", tmp_path / "matrix.png"
    arguments = [
        "all_reduce",
        "barrier",
        "--matrix",
        "--layouts",
        "tcp-2,links-2",
        "--peers",
        "gloo",
        "--sizes",
        "1K",
    ]
    files = ["--json", str(saved), "--plot", str(picture)]
    command = [sys.executable, "-m", "holmes", "bench", *arguments, "--seconds", "0.02", "--rounds", "2", *files]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    document = json.loads(saved.read_text())
    assert document["kind"] == "holmes bench matrix"
    assert document["failures"] == []
    keys = {(cell["layout"], cell["operation"], cell["size_bytes"]) for cell in document["cells"]}
    assert keys == {
        (layout, *each) for layout in ("tcp-2", "links-2") for each in (("all_reduce", 1024), ("barrier", 0))
    }
    assert all(cell["ratios"].keys() == {"gloo"} for cell in document["cells"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "# 4 cells, " in run.stdout
