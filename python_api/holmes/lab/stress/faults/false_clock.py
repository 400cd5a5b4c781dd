"""A wall clock that can be set for one process: no namespace has one of its own. Needs a C compiler."""

from __future__ import annotations

import os
import shlex
import shutil
import struct
import subprocess
from pathlib import Path

NEEDS = "needs a C compiler (cc, or CC=...) to make a process's own wall clock"


class FalseClock:
    """The clock of the processes that are started with `environment`; set from outside, at any time."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where its library and its state are kept. Raises OSError without a compiler."""
        compiler = shlex.split(os.environ.get("CC", "cc"))
        if shutil.which(compiler[0]) is None:
            raise OSError(NEEDS)
        self._file, self._library = folder / "clock", folder / "false_clock.so"
        source = Path(__file__).with_name("false_clock.c")
        command = [*compiler, "-shared", "-fPIC", "-O1", "-o", os.fspath(self._library), os.fspath(source), "-ldl"]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode != 0:
            raise OSError(f"`{shlex.join(command)}` failed: {built.stderr.strip()[-300:]}")
        self.set(0)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment; what is preloaded here already (a sanitizer) stays the first."""
        libraries = [*os.environ.get("LD_PRELOAD", "").split(), os.fspath(self._library)]
        return {"LD_PRELOAD": " ".join(libraries), "HOLMES_FALSE_CLOCK": os.fspath(self._file)}

    def set(self, offset_s: int) -> None:
        """How many whole seconds the clock is ahead of the true one."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:  # the same bytes: they are mapped
            file.write(struct.pack("=q", offset_s))
