"""Output of the commands: one rule for `--json`, lines that fit 80 columns, and what a shell completes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import commands
from topologies import topology_of

from holmes.planning.plan import plan_for
from holmes.tools.bench.measurement import Measurement
from holmes.tools.bench.operations import DTYPES, OPERATIONS, Case
from holmes.tools.bench.tables import Table
from holmes.tools.cli import main

#: What shows no result of its own: it runs somebody's command, serves, writes files, prints another tool's format.
WITHOUT_JSON = {"store", "demo", "build-torch", "report", "simulate calibrate", "plan export", "testbed run"}
SIZES = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 16, "vocabulary": 64}


@pytest.mark.parametrize("name", commands())
def test_json_is_the_same_option_everywhere(name: str) -> None:
    options = [param for param in commands()[name].params if "--json" in param.opts]
    if name in WITHOUT_JSON:
        assert not options
        return
    (option,) = options
    assert option.metavar == "FILE"
    assert "`-`: to standard output" in option.help


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    topology = topology_of([[2, 2], [2, 2]])
    topology.save(tmp_path / "topology.yaml")
    plan_for(topology, model_layers=4, pipeline=2, micro_batch=1, global_batch=8, model=SIZES).save(path)
    return path


@pytest.mark.parametrize(
    "line",
    [
        "nics",
        "nics --matrix",
        "env",
        "topology {folder}/topology.yaml",
        "topology {folder}/topology.yaml --matrix",
        "plan show {folder}/plan.yaml",
        "plan show {folder}/plan.yaml --kind dp",
        "plan check {folder}/plan.yaml --topology {folder}/topology.yaml",
        "testbed show",
        "testbed show far-clusters",
        "testbed specs",
    ],
)
def test_json_goes_to_a_file_or_alone_to_standard_output(
    line: str, plan: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def run(*more: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*line.format(folder=tmp_path).split(), *more])
        assert ended.value.code == 0
        return capfd.readouterr().out

    printed = run("--json", str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(run("--json", "-"))
    assert printed == run()
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize("value", ["[fe80::1]:29400", "[/x]:1"])
def test_a_value_in_brackets_is_shown_as_it_is(
    value: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("HOLMES_STORE", value)
    with pytest.raises(SystemExit):
        main(["env"])
    assert value in capfd.readouterr().out


@pytest.mark.parametrize("width", ["0", ""])
@pytest.mark.parametrize("line", ["nics", "env", "topology {folder}/topology.yaml", "testbed specs", "--help"])
def test_a_terminal_of_unknown_width_shows_all_the_same(
    width: str,
    line: str,
    plan: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = []
    for columns in ("80", width):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit):
            main(line.format(folder=tmp_path).split())
        printed.append("".join(capfd.readouterr()).split())
    assert printed[1]
    assert len(printed[1]) >= len(printed[0]) // 2


@pytest.mark.parametrize("name", commands())
def test_help_fills_80_columns_and_no_more(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    lines = [line.rstrip() for line in capfd.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    first_box = next(number for number, line in enumerate(lines) if line.startswith("╭"))
    for line, below in itertools.pairwise(lines[:first_box]):
        if line and below:  # of one paragraph: its next word found no room
            assert len(line) + 1 + len(below.split()[0]) > 79, line


def completed(words: str) -> list[str]:
    """What bash offers for the last of `words`."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "_HOLMES_COMPLETE": "complete_bash"}
    env |= {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    run = subprocess.run([sys.executable, "-m", "holmes"], capture_output=True, text=True, env=env, check=True)
    return run.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("holmes be", ["bench"]),
        ("holmes plan s", ["show"]),
        ("holmes plan show --r", ["--rank"]),
        ("holmes topology --js", ["--json"]),
        ("holmes to", ["topology", "top"]),
        ("holmes top --on", ["--once"]),
        ("holmes debug --tr", ["--trace"]),
        ("holmes report --be", ["--bench"]),
        ("holmes bench all_r", ["all_reduce"]),
        ("holmes bench c", ["compute"]),
        ("holmes bench compute --hid", ["--hidden"]),
        ("holmes testbed show two", ["two-clusters", "two-clusters-rdma"]),
        ("holmes testbed run --spec on", ["one-cluster", "one-node"]),
    ],
)
def test_a_shell_completes_below_the_first_word(words: str, offered: list[str]) -> None:
    assert completed(words) == offered


def measurement(peer: str, time_s: float, ratios: dict[str, float]) -> Measurement:
    case = Case(OPERATIONS["all_reduce"], 64 << 20, DTYPES["bfloat16"], "product", 0, 4)
    return Measurement(peer, case, (time_s,), [time_s], 10, 1.0, 2.0, 1.0, 0, ratios)


def test_bench_fits_80_columns_and_says_when_paths_differ() -> None:
    table = Table({"holmes": "shm", "gloo": "tcp"}, ["gloo"], 80)
    ours = measurement("holmes", 0.1, {"gloo": 158.95})
    lines = [*table.header(ours.case).splitlines(), table.line(ours), table.line(measurement("gloo", 15.9, {}))]
    assert max(map(len, lines)) <= 80
    assert "# all_reduce, 4 ranks, bfloat16, product" in lines
    assert lines[-2].split()[1:3] == ["holmes", "shm"]
    assert lines[-2].endswith("158.95x*")
    assert table.footnotes() == ["# * /gloo: holmes over shm against gloo over tcp"]


def test_bench_marks_nothing_where_both_go_one_way() -> None:
    table = Table({"holmes": "tcp", "gloo": "tcp"}, ["gloo"])
    assert table.line(measurement("holmes", 0.1, {"gloo": 1.5})).endswith("  1.50x")
    assert table.footnotes() == []
    names = table.header(measurement("gloo", 1.0, {}).case).splitlines()[2].split()
    assert {"algbw", "B/cpu", "foreign"} <= set(names)  # no terminal: all columns


def test_one_of_a_thing_is_said_as_one() -> None:
    command = [sys.executable, "-m", "holmes", "bench", "barrier", "--ranks", "1", "--peers", "none", "--rounds", "1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    shown = subprocess.run([*command, "--seconds", "0.01"], capture_output=True, text=True, check=True, env=env).stdout
    assert "# barrier, 1 rank\n" in shown
    assert "# 1 measurement, 0 wrong elements: OK" in shown


_SLOW_IMPORT = """
import sys, time

class Slow:
    def find_spec(name, path=None, target=None):
        if name == "{name}" and "holmes" in sys.modules:
            print("importing", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Slow)
"""


@pytest.mark.parametrize("slow", ["typer", "numpy", "holmes.planning.search"])
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_word(slow: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SLOW_IMPORT.format(name=slow))
    run = subprocess.Popen(
        [sys.executable, "-m", "holmes", "plan", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "importing\n"
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=50)
    assert (run.returncode, said) == (130, "")


PROGRAM = "from holmes.tools.cli import main; main()"
BENCH = "bench barrier --peers none --ranks 2 --seconds 0.01 --rounds 1"


@pytest.mark.parametrize("line", ["nics", BENCH, "--help", "plan --help"])
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_command_whose_output_is_closed_does_its_work(line: str, closed: str, tmp_path: Path) -> None:
    command = f'"{sys.executable}" -c "{PROGRAM}" {line} {closed}'
    ended = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("line", ["nics", "env", "--help", "plan --help"])
def test_output_that_fills_the_disk_is_told_in_one_sentence(line: str) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, *line.split()], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert ended.stderr.endswith(": No space left on device: look at what standard output goes to, and at /dev/shm\n")
    assert len(ended.stderr.splitlines()) == 1
    assert ended.returncode == 2
