"""What people read where a command cannot do what was asked: one sentence on standard error, and exit code 2."""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

#: What the person can mend: a value, a file, a host, memory, a module. All else is a defect, with its traceback.
_REFUSED = (ValueError, OSError, RuntimeError, ArithmeticError, MemoryError, ModuleNotFoundError)
# torch appends the C++ frames of where an error was raised.
_FRAMES = re.compile(
    r"\s*(Exception raised from .*|\(most recent call first\).*|C\+\+ CapturedTraceback:.*)", re.DOTALL
)
#: The largest number of any option, of whatever: seconds are 68 years then.
MOST = 2**31 - 1
#: Modules that an extra of the installation brings, and that extra.
_EXTRAS = {"torch": "torch", "matplotlib": "plot"}


def sentence(error: BaseException) -> str:
    """An error in one line, without C++ frames; a file's name first. Our own of a job that failed keep their lines."""
    if isinstance(error, ModuleNotFoundError):
        return missing_module(error)
    if isinstance(error, MemoryError):
        return "this does not fit into memory; ask for less"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # a file would be named
        return f"{error.strerror}: look at what standard output goes to, and at /dev/shm"
    from holmes_comm.errors import HolmesError, UsageError  # not for `holmes --help`

    if isinstance(error, HolmesError) and not isinstance(error, UsageError):
        return str(error)
    return " ".join(_FRAMES.sub("", str(error)).split()) or type(error).__name__


def missing_module(error: ModuleNotFoundError, extra: str | None = None) -> str:
    """Which Python module is missing and what brings it; `extra`: of the installation, where it is not the module's."""
    extra = extra or _EXTRAS.get((error.name or "").partition(".")[0])
    fix = f"; run: pip install 'holmes-comm[{extra}]'" if extra else ""
    return f"this needs Python module {error.name}, which is not installed{fix}"


def refuse(name: str, error: BaseException) -> None:
    """Prints the sentence of a command that ends with exit code 2."""
    typer.echo(f"{name}: {sentence(error)}", err=True)


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line has this option."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def refuse_given(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raises UsageError for the first of these options that the command line has: nobody is to believe in it."""
    from holmes_comm.errors import UsageError  # not for `holmes --help`

    for name in names:
        if is_given(context, name):
            raise UsageError(f"--{name.replace('_', '-')} says nothing here: {why}; leave it out")


def check_number(name: str, value: float) -> None:
    """Raises BadParameter for what no option means: nan, and what is beyond all that is counted here."""
    if isinstance(value, float) and math.isnan(value):
        raise typer.BadParameter(f"{name}=nan is no number that can be counted with")
    if not -MOST <= value <= MOST:
        raise typer.BadParameter(f"{name}={value} is beyond {MOST}, the most of any option")


class _Refusing:
    def __init__(self, *args: Any, **options: Any) -> None:
        # A docstring's lines are for the source: a paragraph flows into the terminal's width.
        paragraphs = re.split(r"\n\s*\n", options.get("help") or "")
        options["help"] = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        super().__init__(*args, **options)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        rest = super().parse_args(ctx, args)  # type: ignore[misc]
        for param in self.params:  # type: ignore[attr-defined]
            values = ctx.params.get(param.name)
            for value in values if isinstance(values, (list, tuple)) else [values]:
                if isinstance(value, (int, float)):
                    try:
                        check_number(param.name, value)
                    except typer.BadParameter as error:
                        error.ctx = ctx  # whose help says more
                        raise
        return rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except _REFUSED as error:
            if isinstance(error, ModuleNotFoundError) and str(error.name).startswith("holmes"):
                raise
            refuse(ctx.command_path, error)
            raise typer.Exit(2) from None


class RefusingCommand(_Refusing, TyperCommand):
    """A command that answers what it cannot do with one sentence and exit code 2."""


class RefusingGroup(_Refusing, TyperGroup):
    """The same for a command that has subcommands."""
