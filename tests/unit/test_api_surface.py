"""The public surface: names exist and are documented, stubs match the built module, variables have their page."""

import importlib
import importlib.metadata
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys

import pytest
from paths import ROOT

import holmes
import holmes_comm

VARIABLE = re.compile(r'"(HOLMES_[A-Z0-9_]+)"')

#: Names that programs import: they stay, whatever moves inside.
PUBLIC = {
    holmes: """
    DistributedOptimizer Generation KINDS PipelineStage Plan ProcessGroups Proof Topology __version__ check
    gather_topology groups make_plan model partition pipeline_schedule pipeline_stages plan plan_for
    process_groups run_elastic search simulate workable_plan
    """,
    holmes_comm: """
    AbortedError AtomicStore Communicator CommunicatorError Compression GroupOptions HolmesError IntegrityError
    JobError LocalStore
    Metrics MismatchError NcclCommunicator NcclGroup NcclProfile Nic NicError NicSelection PeerLostError PrefixStore
    ProtocolError Store SystemError TcpStore TimeoutError UnreachableError UsageError Work compressed
    discover_nics
    empty flight_record init metrics shared_tensors
    """,
}


def modules():
    for package in (holmes, holmes_comm):
        yield package.__name__
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not any(part.startswith("_") for part in info.name.split(".")):
                yield info.name


def has_text(documented) -> bool:
    """Whether the docstring says more than the signature that pybind11 writes by itself."""
    lines = (inspect.getdoc(documented) or "").splitlines()
    return any(line.strip() and "->" not in line and line.strip() != "Overloaded function." for line in lines)


@pytest.mark.parametrize("name", list(modules()))
def test_public_names_exist_and_are_documented(name):
    if name.endswith(".torchft"):  # it extends a class of theirs
        pytest.importorskip("torchft", reason="needs torchft: make test-trainers")
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    public = getattr(module, "__all__", [])
    assert len(public) == len(set(public)), f"{name}.__all__ names something twice"
    missing = [entry for entry in public if not hasattr(module, entry)]
    assert not missing, f"{name}.__all__ names what does not exist: {missing}"
    objects = [(entry, getattr(module, entry)) for entry in public]
    described = [(entry, value) for entry, value in objects if inspect.isclass(value) or inspect.isroutine(value)]
    assert not [entry for entry, value in described if not has_text(value)], f"no docstring in {name}"


@pytest.mark.parametrize("package", list(PUBLIC), ids=lambda package: package.__name__)
def test_public_names_stay(package):
    names = set(PUBLIC[package].split())
    assert names <= set(package.__all__)
    assert all(getattr(package, name) is not None for name in names)


def test_versions_agree():
    version = importlib.metadata.version("holmes-comm")
    assert holmes.__version__ == version
    assert holmes_comm.__version__ == version
    assert f"project(Holmes VERSION {version} " in (ROOT / "CMakeLists.txt").read_text()


def test_compiled_module_is_documented():
    from holmes_comm import _C

    undocumented = []
    for name, value in vars(_C).items():
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        if not has_text(value):
            undocumented.append(name)
        if inspect.isclass(value):
            methods = [(key, member) for key, member in vars(value).items() if not key.startswith("_")]
            undocumented += [f"{name}.{key}" for key, member in methods if callable(member) and not has_text(member)]
    assert not undocumented


def test_stub_matches_the_built_module():
    pytest.importorskip("pybind11_stubgen")
    command = [sys.executable, "tools/make_stubs.py", "--check", "holmes_comm/_C.pyi"]
    check = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert check.returncode == 0, f"run `make stubs`:\n{check.stdout}{check.stderr}"


def test_environment_page_matches_the_table():
    command = [sys.executable, "tools/make_environment.py", "--check"]
    check = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr


def test_every_variable_is_documented():
    folders = [ROOT / "csrc", ROOT / "holmes_comm", ROOT / "python_api"]
    sources = [path for folder in folders for path in folder.rglob("*") if path.suffix in {".py", ".cpp", ".hpp"}]
    table = ROOT / "csrc" / "holmes" / "core" / "env.cpp"
    used = {name for path in sources if path != table for name in VARIABLE.findall(path.read_text())}
    documented = {variable.name for variable in holmes_comm._C.env_variables()}
    read_elsewhere = set(re.findall(r'\{\{"(HOLMES_\w+)"[^{}]*\},\s*nullptr\}', table.read_text()))
    assert len(read_elsewhere) > 5, "no variable found: has the pattern rotted?"
    assert used - documented == set(), "describe them in csrc/holmes/core/env.cpp"
    assert read_elsewhere - used == set(), "csrc/holmes/core/env.cpp describes variables that no source reads"


def test_env_command_shows_what_is_set_but_no_secret():
    command = [sys.executable, "-m", "holmes", "env", "--json", "-", "--set"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLMES_")}
    environment |= {"HOLMES_SECRET": "hidden", "HOLMES_SHM": "0", "XDG_RUNTIME_DIR": "/tmp"}
    shown = json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert {row["name"]: row["set"] for row in shown["variables"]} == {
        "HOLMES_SECRET": "(set)",
        "HOLMES_SHM": "0",
        "XDG_RUNTIME_DIR": "/tmp",
    }
    assert all(row["meaning"] and "`" not in row["meaning"] for row in shown["variables"])
