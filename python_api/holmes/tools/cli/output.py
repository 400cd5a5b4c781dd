"""`--json FILE`, alike in every command."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console

from holmes import files
from holmes_comm.errors import UsageError

#: The file's name that stands for standard output.
STDOUT = Path("-")


def columns() -> int | None:
    """Of the terminal, or as COLUMNS says; None: nobody reads at a width, and lines stay whole for other programs."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or "COLUMNS" in os.environ else None


def plain_console(*, stderr: bool = False) -> Console:
    """For output in which names and values in brackets are what they are, no markup."""
    return Console(stderr=stderr, markup=False)


def say(text: str, indent: str = "") -> None:
    """Prints sentences, a line each; where they are wider than the terminal they go on below, behind `indent`."""
    width = columns()
    for line in text.splitlines():
        start = line[: len(line) - len(line.lstrip())]
        wrapped = textwrap.wrap(
            line.strip(),
            width or sys.maxsize,
            initial_indent=start,
            subsequent_indent=start + indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        typer.echo("\n".join(wrapped))


def _checked(path: Path | None) -> Path | None:
    """Before the work whose result is to be written there."""
    try:
        files.check_writable(None if path == STDOUT else path)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    return path


JsonFile = Annotated[
    Optional[Path],  # noqa: UP045 (typer reads it at run time)
    typer.Option(
        "--json",
        metavar="FILE",
        callback=_checked,
        help="Also write the result as JSON to this file; `-`: to standard output, which then has nothing else.",
        show_default=False,
    ),
]


def show(path: Path | None, result: Any, printed: Callable[[], None]) -> None:
    """Shows a command's result: `printed()` for people, and `result` as JSON where `--json` says so."""
    if path != STDOUT:
        printed()
    if path is None:
        return
    text = json.dumps(files.plain(result), indent=2, default=str) + "\n"
    if path == STDOUT:
        typer.echo(text, nl=False)
    else:
        files.replace(path, text)
