"""What is installed: the modules, the C++ library with headers and CMake package, and a program that links it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import resources
from pathlib import Path

import pytest
from paths import ROOT

CONSUMER = ROOT / "tests" / "cpp" / "consumer"


def folder(kind: str) -> Path:
    command = [sys.executable, "-m", "holmes_comm", f"--{kind}-dir"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def test_installed_files():
    package = resources.files("holmes_comm")
    assert package.joinpath("py.typed").is_file()
    assert package.joinpath("_C.pyi").is_file()
    assert resources.files("holmes").joinpath("py.typed").is_file()
    assert (folder("include") / "holmes" / "comm" / "communicator.hpp").is_file()
    assert (folder("cmake") / "HolmesConfig.cmake").is_file()
    # A wheel holds no links: exactly one library, whose file name is its SONAME.
    libraries = list(folder("lib").glob("libholmes.so*"))
    assert len(libraries) == 1
    assert not libraries[0].is_symlink()
    dynamic = subprocess.run(["readelf", "-d", libraries[0]], check=True, capture_output=True, text=True).stdout
    assert f"[{libraries[0].name}]" in dynamic


def test_library_needs_neither_python_nor_torch():
    (library,) = folder("lib").glob("libholmes.so*")
    dynamic = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    needed = [line for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert needed
    assert not [line for line in needed if "python" in line or "torch" in line or "cuda" in line]


def test_module_without_option_says_what_to_do():
    run = subprocess.run([sys.executable, "-m", "holmes_comm"], capture_output=True, text=True)
    assert run.returncode != 0
    assert "--cmake-dir" in run.stderr


def test_cpp_program_links_the_installed_library(tmp_path):
    tools = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=tools)
    if cmake is None:
        pytest.skip("cmake is not installed; `pip install cmake` brings it")
    subprocess.run([cmake, "-S", CONSUMER, "-B", tmp_path, f"-DHolmes_DIR={folder('cmake')}"], check=True)
    subprocess.run([cmake, "--build", tmp_path], check=True)
    run = subprocess.run([tmp_path / "consumer"], check=True, capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["3", "3"]


@pytest.mark.parametrize(
    ("known", "says"), [(["2.9", "2.13"], "for torch 2.9, 2.13, and"), ([], "built without torch")]
)
def test_a_backend_of_another_torch_is_not_loaded(known, says, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="needs torch")
    from holmes_comm import UsageError, c10d_module

    assert ".".join(c10d_module.load().__file__.split("/")[-2:]).startswith(c10d_module._minor())  # as installed
    monkeypatch.setattr(c10d_module, "installed_minors", lambda: known)
    monkeypatch.setattr(c10d_module, "_version", lambda: "2.0.1+cpu")
    with pytest.raises(UsageError, match=f"{re.escape(says)}.*this is torch 2.0.1.*holmes build-torch"):
        c10d_module.load.__wrapped__()


def test_what_the_package_has_is_listed_from_old_to_new(tmp_path, monkeypatch):
    from holmes_comm import c10d_module

    for minor, file in (("2.13", c10d_module._FILE), ("2.9", c10d_module._FILE), ("2.10", "_c10d.another-python.so")):
        (tmp_path / "c10d" / minor).mkdir(parents=True)
        (tmp_path / "c10d" / minor / file).touch()
    monkeypatch.setattr(c10d_module, "_PACKAGE", tmp_path)
    assert c10d_module.installed_minors() == ["2.9", "2.13"]


def test_a_build_without_tools_names_them(monkeypatch):
    pytest.importorskip("torch", reason="needs torch")
    from holmes_comm import UsageError, c10d_module

    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    with pytest.raises(UsageError, match=r"cmake is not here.*pip install cmake ninja"):
        c10d_module.build()


def test_make_build_says_what_it_does_before_it_is_silent(tmp_path):
    """pip is quiet, and hides what a build under it prints: the C++ engine is built before, in sight."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    command = ["make", "-n", "build", f"VENV={tmp_path}/venv"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    said = [line.startswith("echo ") for line in lines]
    takes_long = re.compile(r"(-m venv|setup\.py|^PIP\S* .*-m pip install) ")
    slow = [number for number, line in enumerate(lines) if takes_long.search(line)]
    assert len(slow) >= 4, lines
    for number in slow:
        assert said[number - 1], f"nothing is said before: {lines[number]}"
    build, install = (next(n for n, line in enumerate(lines) if words in line) for words in ("build_ext", "-e ."))
    assert build < install
