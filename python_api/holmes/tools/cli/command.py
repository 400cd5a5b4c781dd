"""The `holmes` command. Subcommands are imported when they are used, so that none needs what only another one needs."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from holmes import __version__
from holmes.interrupt import raise_as_ever
from holmes.tools.cli.refusal import RefusingCommand, missing_module, refuse

# Of click, or of what typer has in its place.
_UsageError: Any = typer.BadParameter.__mro__[1]

#: Subcommand: where it is in this package (a typer app or a function) and what `holmes --help` says about it.
SUBCOMMANDS = {
    "nics": ("tools.cli.nics:nics", "The NICs of this host, as Holmes sees them."),
    "topology": (
        "tools.cli.topology:topology",
        "All hosts' NICs, who reaches whom, and the clusters that follow.",
    ),
    "doctor": (
        "tools.cli.doctor:doctor",
        "Look a job's hosts over before it starts; each finding with its fix.",
    ),
    "store": ("tools.cli.store:store", "Serve the store of an elastic job, which outlives its hosts."),
    "stress": ("lab.stress.cli:stress", "Communication shaped like training, every result checked."),
    "debug": ("tools.cli.debug:debug", "Why a job hangs or failed: who waits for whom, in what, on which NIC."),
    "top": ("tools.cli.top:top", "A running job, live: each rank's groups, NICs, rates and waits."),
    "report": ("tools.cli.report:report", "One HTML page: this machine, the topology, a plan, what bench measured."),
    "testbed": ("lab.testbed.cli:app", "Run a command on emulated nodes and clusters, without root."),
    "bench": ("tools.cli.bench:bench", "Latency and bandwidth of the collectives, per NIC."),
    "bench compute": ("tools.cli.bench_compute:compute", "How long a GPT's parts take on this machine."),
    "plan": (
        "tools.cli.plan:app",
        "Search for the fastest plan; what a plan says, and why; the proof of its groups.",
    ),
    "simulate": (
        "tools.cli.simulate:simulate",
        "Predict a plan's step time, bubble and bottleneck link; no GPU.",
    ),
    "simulate calibrate": (
        "tools.cli.simulate:calibrate",
        "Rates for the simulator from `holmes bench` files.",
    ),
    "env": ("tools.cli.env:env", "The environment variables that Holmes reads, and what is set here."),
    "build-torch": (
        "tools.cli.build_torch:build_torch",
        "Compile the torch.distributed backend for the torch that is installed here.",
    ),
    "demo": ("lab.demo.cli:demo", "Train a small GPT over two emulated clusters, with and without Holmes."),
}


class _Group(TyperGroup):
    """All subcommands. Those that a shell completes are loaded, for their options and commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        words = _words_of_name(args)
        if ctx.resilient_parsing and words:
            name = " ".join(args[:words])
            return name, typer.main.get_command(load(SUBCOMMANDS[name][0])), args[words:]
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        # A shell's words have no spaces: what follows "bench" is completed by bench.
        return [item for item in super().shell_complete(ctx, incomplete) if " " not in item.value]


def _words_of_name(args: Sequence[str]) -> int:
    """How many of `args` name a subcommand: "bench compute" before "bench"; 0 where they name none."""
    return next((words for words in (2, 1) if len(args) >= words and " ".join(args[:words]) in SUBCOMMANDS), 0)


app = typer.Typer(cls=_Group, no_args_is_help=True, help="Training over clusters whose network cards differ.")


def load(target: str) -> typer.Typer:
    """Imports a subcommand, "module:name" within this package, and returns it as a typer app."""
    module, _, attribute = target.partition(":")
    loaded = getattr(importlib.import_module(f"holmes.{module}"), attribute)
    if isinstance(loaded, typer.Typer):
        return loaded
    single = typer.Typer()
    single.command(cls=RefusingCommand)(loaded)
    return single


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the `holmes` command; `args` default to the command line's."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (to the process's end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal's encoding lacks is no reason to end a job
            stream.reconfigure(errors="backslashreplace")
    if os.environ.get("COLUMNS", "").strip("0 ") == "":  # a terminal of unknown size: rich would print nothing
        os.environ.pop("COLUMNS", None)
    args = list(sys.argv[1:] if args is None else args)
    words = _words_of_name(args)
    command, prog_name = app, "holmes"
    if words:
        name = " ".join(args[:words])
        target = SUBCOMMANDS[name][0]
        prog_name = f"holmes {name}"
        try:
            command = load(target)
        except ModuleNotFoundError as error:
            extra = "lab" if target.startswith("lab.") else None
            typer.echo(f"{prog_name}: {missing_module(error, extra)}", err=True)
            sys.exit(2)
        args = args[words:]
    raise_as_ever()
    try:
        status = command(args=args, prog_name=prog_name, standalone_mode=False)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            place = error.ctx.command_path if error.ctx else prog_name
            typer.echo(f"{place}: {' '.join(error.format_message().split())} (see {place} --help)", err=True)
        sys.exit(2)
    except KeyboardInterrupt:  # before the command itself, which has its own way
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        raise
    except OSError as error:  # of its help
        refuse(prog_name, error)
        sys.exit(2)
    sys.exit(status if isinstance(status, int) else 0)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holmes {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _forward(target: str) -> Callable[[typer.Context], Any]:
    def command(ctx: typer.Context) -> None:
        load(target)(args=ctx.args, prog_name=ctx.command_path)

    return command


for _name, (_target, _help) in SUBCOMMANDS.items():
    # Listed for `holmes --help` and completion; main() goes to the subcommand directly.
    app.command(_name, help=_help, add_help_option=False, context_settings={"allow_extra_args": True})(
        _forward(_target)
    )
