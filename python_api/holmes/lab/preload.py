"""Libraries in C that are loaded before all others (LD_PRELOAD), built where they are used."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path


def build_library(source: Path, library: Path) -> None:
    """Builds `library` from the C file `source`; others may build it meanwhile. Raises OSError without a compiler."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        raise OSError(f"needs a C compiler (cc, or CC=...) to build {source.name}")
    fresh = library.with_name(f"{library.name}.{os.getpid()}")
    command = [*compiler, "-shared", "-fPIC", "-O1", "-o", os.fspath(fresh), os.fspath(source), "-ldl"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        raise OSError(f"`{shlex.join(command)}` failed: {built.stderr.strip()[-300:]}")
    fresh.replace(library)
