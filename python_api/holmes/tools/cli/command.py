"""The `holmes` command. Subcommands are imported when they are used, so that none needs what only another one needs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from holmes import __version__

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
    "demo": ("lab.demo.cli:demo", "Train a small GPT over two emulated clusters, with and without Holmes."),
}

app = typer.Typer(no_args_is_help=True, help="Training over clusters whose network cards differ.")


def load(target: str) -> typer.Typer:
    """Imports a subcommand, "module:name" within this package, and returns it as a typer app."""
    module, _, attribute = target.partition(":")
    loaded = getattr(importlib.import_module(f"holmes.{module}"), attribute)
    if isinstance(loaded, typer.Typer):
        return loaded
    single = typer.Typer()
    single.command()(loaded)
    return single


def needs_module(command: str, error: ModuleNotFoundError, of_lab: bool) -> str:
    """What to say where a command lacks a Python module: the lab's are an extra of the installation."""
    fix = "; run: pip install 'holmes-comm[lab]'" if of_lab else ""
    return f"{command} needs Python module {error.name}, which is not installed{fix}"


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the `holmes` command; `args` default to the command line's."""
    args = list(sys.argv[1:] if args is None else args)
    words = 2 if " ".join(args[:2]) in SUBCOMMANDS else 1  # "bench compute" before "bench"
    name = " ".join(args[:words])
    if name in SUBCOMMANDS:
        try:
            command = load(SUBCOMMANDS[name][0])
        except ModuleNotFoundError as error:
            typer.echo(needs_module(f"holmes {name}", error, SUBCOMMANDS[name][0].startswith("lab.")), err=True)
            sys.exit(2)
        command(args=args[words:], prog_name=f"holmes {name}")
    else:
        app(args=args, prog_name="holmes")


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
