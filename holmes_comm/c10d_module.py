"""The compiled half of the torch backend: a module for each minor version of torch, whose C++ classes change with it.

A wheel brings some of them in ``holmes_comm/c10d``; ``holmes build-torch`` makes another one in the user's cache.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

from holmes_comm.errors import UsageError

__all__ = ["build", "installed_minors", "load"]

_NAME = "holmes_comm._c10d"
_PACKAGE = Path(__file__).parent
_FILE = "_c10d" + EXTENSION_SUFFIXES[0]


@functools.cache
def load() -> ModuleType:
    """The module for the torch that is imported. Local.

    Raises UsageError where there is none for it: a module for another torch would crash it.
    """
    import holmes_comm._C  # noqa: F401 (loads libholmes, which the module names without a path)

    minor = _minor()
    for folder in (_PACKAGE / "c10d" / minor, _built_folder(minor)):
        if (folder / _FILE).exists():
            spec = importlib.util.spec_from_file_location(_NAME, folder / _FILE)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[_NAME] = module
            spec.loader.exec_module(module)
            return module
    known = installed_minors()
    has = f"has its torch.distributed backend for torch {', '.join(known)}" if known else "was built without torch"
    raise UsageError(
        f"this Holmes {has}, and this is torch {_version()}; build the backend for it: holmes build-torch (once where "
        "home folders are shared, else on each host)"
    )


def installed_minors() -> list[str]:
    """The versions of torch, "2.13", that the installed package has a module for and this Python can load. Local."""
    found = (file.parent.name for file in (_PACKAGE / "c10d").glob(f"*/{_FILE}"))
    return sorted(found, key=lambda minor: [int(part) for part in minor.split(".")])


def build(say: Callable[[str], None] = print) -> Path:
    """Compiles the module for the torch that is installed, with its own cmake and ninja where they are. Local.

    Returns the module's file. Raises UsageError where a tool is missing or the compiler refuses.
    """
    source = _PACKAGE / "c10d" / "source" / "c10d"
    if not source.is_dir():
        raise UsageError(f"{source} is missing: this Holmes was not built; run `pip install .` or `make build`")
    tools = {name: _tool(name) for name in ("cmake", "ninja")}
    folder = _built_folder(_minor())
    with tempfile.TemporaryDirectory() as scratch:
        configure = [
            *(tools["cmake"], "-S", str(source), "-B", scratch, "-GNinja"),
            *(f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}", f"-DPython_EXECUTABLE={sys.executable}"),
            *(f"-DHolmes_DIR={_PACKAGE / 'lib' / 'cmake' / 'Holmes'}", f"-DHOLMES_TORCH_ROOTS={_torch_folder()}"),
        ]
        say(f"compiling Holmes' backend for torch {_version()}: a minute or two")
        for command in (configure, [tools["cmake"], "--build", scratch]):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode != 0:
                tail = "\n".join(done.stdout.splitlines()[-20:])
                raise UsageError(
                    f"{' '.join(command[:2])} failed; a C++20 compiler (g++ 11 or newer) must work:\n{tail}"
                )
        (built,) = Path(scratch).glob(f"*/{_FILE}")
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"{_FILE}.{os.getpid()}"
        shutil.copyfile(built, new)
    new.replace(folder / _FILE)  # never half a file for a rank that starts just now
    return folder / _FILE


def _built_folder(minor: str) -> Path:
    """In the user's cache, by the library that a module was linked with: an upgrade finds none of the old ones."""
    (library,) = (_PACKAGE / "lib").glob("libholmes.so.*")
    with library.open("rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "holmes-comm" / f"{library.name}-{digest}" / minor


def _version() -> str:
    import torch

    return str(torch.__version__)


def _minor() -> str:
    return ".".join(_version().split(".")[:2])


def _torch_folder() -> Path:
    import torch

    return Path(torch.__file__).parent


def _tool(name: str) -> str:
    beside = shutil.which(name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if beside is None:
        raise UsageError(f"{name} is not here; run: pip install cmake ninja")
    return beside
