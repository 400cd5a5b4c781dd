"""Small libraries in C that are loaded before all others into a rank, and a file by which the driver steers them."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from holmes.lab.preload import build_library

FAULTY_CALLS = "HOLMES_FAULTY_CALLS"


class Preloaded:
    """`name`.c beside this file, for processes that are started with `environment`; `variable` names its file.

    The file has `count` numbers of 64 bits, 0 at first, which both sides see at once.
    """

    def __init__(self, folder: Path, name: str, variable: str, count: int) -> None:
        """`folder`: where library and file are kept. Raises OSError without a compiler."""
        self._variable, self._count = variable, count
        self._file, self._library = folder / name, folder / f"{name}.so"
        build_library(Path(__file__).with_name(f"{name}.c"), self._library)
        self._file.write_bytes(bytes(8 * count))

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment; what is preloaded here already (a sanitizer) stays the first."""
        libraries = [*os.environ.get("LD_PRELOAD", "").split(), os.fspath(self._library)]
        return {"LD_PRELOAD": " ".join(libraries), self._variable: os.fspath(self._file)}

    def write(self, *numbers: int) -> None:
        """All of them."""
        with self._file.open("r+b") as file:  # the same bytes: they are mapped
            file.write(struct.pack(f"={self._count}q", *numbers))

    def read(self) -> tuple[int, ...]:
        """All of them, as they are now."""
        return struct.unpack(f"={self._count}q", self._file.read_bytes())


class FalseClock(Preloaded):
    """A wall clock that can be set for one process, from outside, at any time: no namespace has one of its own."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where its library and its state are kept. Raises OSError without a compiler."""
        super().__init__(folder, "false_clock", "HOLMES_FALSE_CLOCK", 1)

    def set(self, offset_s: int) -> None:
        """How many whole seconds the clock is ahead of the true one."""
        self.write(offset_s)


class FaultyCalls(Preloaded):
    """System calls of one process that err: received bits are flipped, threads refused, disks full; or that kill it."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where its library and its state are kept. Raises OSError without a compiler."""
        super().__init__(folder, "faulty_calls", FAULTY_CALLS, 4)

    def set(
        self, *, flips: int = 0, refuses_threads: bool = False, disk_is_full: bool = False, killed_on: int = 0
    ) -> None:
        """In how many of the next large messages a bit is flipped; no thread can be started; no file can grow.

        `killed_on`: the process is killed on so many-th of its next calls (SIGKILL); 0: on none.
        """
        self.write(flips, int(refuses_threads), int(disk_is_full), killed_on)

    @classmethod
    def kill_this_process_on(cls, call: int) -> None:
        """Local, in a process that was started with `environment`: on so many-th of its calls from now on."""
        with open(os.environ[FAULTY_CALLS], "r+b") as file:
            file.seek(3 * 8)
            file.write(struct.pack("=q", call))

    @property
    def flips_left(self) -> int:
        """How many are still to come."""
        return self.read()[0]
