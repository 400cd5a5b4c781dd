"""`holmes env`: the launcher that was recognized, the variables that Holmes reads, and their values here."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from holmes.tools.cli.output import JsonFile, plain_console, show
from holmes.tools.doctor.variables import NOT_READ, fix_of, plain
from holmes_comm import _C
from holmes_comm.errors import UsageError
from holmes_comm.launch import recognize

_SECRETS = ("HOLMES_SECRET",)


def env(
    json_file: JsonFile = None,
    only_set: Annotated[bool, typer.Option("--set", help="Those that are set here only.")] = False,
) -> None:
    """Lists which launcher started this process, and what Holmes reads from the environment: allowed values, default,
    meaning, and what is set here; and what looks like a variable of Holmes but is none."""
    rows = [_row(variable) for variable in _C.env_variables()]
    rows = [row for row in rows if row["set"] is not None or not only_set]
    not_read = {name: fix for name in sorted(os.environ) if (fix := fix_of(name)) is not None}
    found = {"launcher": _launcher(), "variables": rows, "not_read": not_read}
    show(json_file, found, lambda: _print(plain_console(), found))


def _launcher() -> str:
    """Who started this process as which rank, where the ranks meet; what is wrong with what a launcher set."""
    try:
        found = recognize()
        if found is None:
            return "none; this process is not of a job"
        here = "" if found.local_rank is None else f", {found.local_rank} of {found.local_size or '?'} on this host"
        place = f"{found.launcher}: rank {found.rank} of {found.size}{here}"
        return f"{place}; the ranks meet at {':'.join(map(str, found.store_address()))}"
    except UsageError as error:
        return str(error)


def _print(console: Console, found: dict[str, Any]) -> None:
    lines = [f"launcher: {found['launcher']}"]
    lines += [f"{name}: {NOT_READ}; {fix}" for name, fix in found["not_read"].items()]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)  # one line each for grep
    table = Table(box=None, pad_edge=False, show_lines=True, header_style="bold")
    for header in ("variable", "values", "default", "meaning"):
        table.add_column(header, overflow="fold")
    for row in found["variables"]:
        name = f"{row['name']}\n= {row['set']}" if row["set"] is not None else row["name"]
        table.add_row(name, row["values"], row["default"], row["meaning"])
    if found["variables"]:
        console.print(table)


def _row(variable: _C.EnvVariable) -> dict[str, str | None]:
    value = os.environ.get(variable.name)
    return {
        "name": variable.name,
        "set": "(set)" if value and variable.name in _SECRETS else value,
        "values": plain(variable.values),
        "default": plain(variable.default),
        "meaning": plain(variable.meaning),
    }
