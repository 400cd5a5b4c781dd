"""`holmes env`: the environment variables that Holmes reads, and what they are set to here."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from holmes.tools.doctor.variables import plain
from holmes_comm import _C

_SECRETS = ("HOLMES_SECRET",)


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
    only_set: Annotated[bool, typer.Option("--set", help="Those that are set here only.")] = False,
) -> None:
    """Lists what Holmes reads from the environment: allowed values, default, meaning, and what is set here."""
    rows = [_row(variable) for variable in _C.env_variables()]
    rows = [row for row in rows if row["set"] is not None or not only_set]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False, show_lines=True, header_style="bold")
    for header in ("variable", "values", "default", "meaning"):
        table.add_column(header, overflow="fold")
    for row in rows:
        name = f"{row['name']}\n= {row['set']}" if row["set"] is not None else row["name"]
        table.add_row(name, row["values"], row["default"], row["meaning"])
    Console().print(table)


def _row(variable: _C.EnvVariable) -> dict[str, str | None]:
    value = os.environ.get(variable.name)
    return {
        "name": variable.name,
        "set": "(set)" if value and variable.name in _SECRETS else value,
        "values": plain(variable.values),
        "default": plain(variable.default),
        "meaning": plain(variable.meaning),
    }
