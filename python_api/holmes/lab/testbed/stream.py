"""One log stream for all ranks, each line with its node and rank in front."""

from __future__ import annotations

import sys
import threading

from rich.console import Console
from rich.text import Text

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")


class LogStream:
    """Prints lines as "[node/rank n] line"; coloured by node on a terminal. Thread safe."""

    def __init__(self, nodes: list[str], console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._colours = {node: _COLOURS[index % len(_COLOURS)] for index, node in enumerate(nodes)}
        self._lock = threading.Lock()

    def __call__(self, rank: int, node: str, line: str) -> None:
        """Prints one line of a rank."""
        prefix = f"[{node}/rank {rank}] "
        with self._lock:
            if self._console.is_terminal:
                self._console.print(Text(prefix, style=self._colours[node]) + Text.from_ansi(line), soft_wrap=True)
            else:
                self._console.file.write(f"{prefix}{line}\n")
                self._console.file.flush()
