"""Imports go one way: the check of `make lint` passes on this tree and notices each import that goes up."""

import subprocess
import sys

import pytest
from paths import ROOT

CHECK = ROOT / "tools" / "check_imports.py"


def check(*repository):
    return subprocess.run([sys.executable, CHECK, *repository], capture_output=True, text=True, timeout=60)


def test_this_tree_passes():
    run = check()
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(
    ("place", "line", "told"),
    [
        ("planning/plan/plan.py", "from holmes.training import overlap", "holmes.training.overlap"),
        ("planning/plan/plan.py", "def f():\n    import holmes", "(holmes)"),
        ("planning/model/gpt.py", "from holmes.planning.plan.plan import Plan", "holmes.planning.plan"),
        ("training/session.py", "import holmes.lab.testbed", "holmes.lab.testbed"),
        ("tools/cli/bench.py", "import holmes.lab.testbed", "holmes.lab.testbed"),
        ("tools/bench/rank.py", "NAME = 'holmes.lab.testbed'", "holmes.lab.testbed"),
        ("elsewhere/part.py", "", "no line of the order"),
    ],
)
def test_an_import_that_goes_up_is_told(tmp_path, place, line, told):
    modules = ["training/overlap", "planning/plan/plan", "lab/testbed"]
    for module in [f"python_api/holmes/{name}/__init__.py" for name in modules] + ["holmes_comm/__init__.py"]:
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module).write_text("")
    bad = tmp_path / "python_api" / "holmes" / place
    bad.parent.mkdir(parents=True, exist_ok=True)
    bad.write_text(line + "\n")
    run = check(tmp_path)
    assert run.returncode == 1
    assert place in run.stdout
    assert told in run.stdout


def test_the_command_line_finds_the_lab_by_name(tmp_path):
    for module in ("lab/testbed/__init__", "tools/cli/command"):
        file = tmp_path / "python_api" / "holmes" / f"{module}.py"
        file.parent.mkdir(parents=True)
        file.write_text("NAME = 'holmes.lab.testbed'\n" if "cli" in module else "")
    assert check(tmp_path).returncode == 0
