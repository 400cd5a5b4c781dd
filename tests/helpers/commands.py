"""The commands of `holmes` as their own parsers describe them."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import typer

from holmes.tools.cli import load
from holmes.tools.cli.command import SUBCOMMANDS


def commands() -> dict[str, Any]:
    """All commands of the command line by name, those of groups too."""
    found = {}
    for name, (target, _) in SUBCOMMANDS.items():
        command = typer.main.get_command(load(target))
        inner = getattr(command, "commands", {})
        if not inner or getattr(command, "invoke_without_command", False):
            found[name] = command
        found |= {f"{name} {inside}": each for inside, each in inner.items()}
    return found


def numeric_options() -> list[tuple[str, str]]:
    """(command, option) of every option that takes a number."""
    found = []
    for name, command in commands().items():
        hints = get_type_hints(command.callback)  # versions of typer tell the types of parameters differently
        for param in command.params:
            if param.param_type_name == "option" and {int, float} & _types(hints.get(param.name)):
                found.append((name, max(param.opts, key=len)))
    return found


def _types(hint: Any) -> set[Any]:
    """Those that a hint is made of."""
    return {hint}.union(*map(_types, get_args(hint)))
