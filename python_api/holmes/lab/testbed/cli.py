"""`holmes testbed`: run a command on emulated nodes, show or check what a spec describes, list the built-in specs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from importlib import resources
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holmes.files import make_folder
from holmes.lab.testbed.changes import load_changes
from holmes.lab.testbed.check import CheckedPath, Quantity, check_testbed, complaints
from holmes.lab.testbed.launch import Testbed
from holmes.lab.testbed.spec import Link, NetworkSpec, Nic, Spec, builtin_specs, load_spec
from holmes.tools.cli import output
from holmes.tools.cli.output import JsonFile
from holmes.tools.cli.refusal import RefusingCommand, RefusingGroup

app = typer.Typer(
    cls=RefusingGroup, no_args_is_help=True, help="Emulated nodes and clusters on this machine, without root."
)


def _complete_spec(incomplete: str) -> list[str]:
    return [name for name in builtin_specs() if name.startswith(incomplete)]


_SPEC_HELP = "A built-in spec's name or a YAML file."


@app.command(cls=RefusingCommand, context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments, after `--`.")],
    spec: Annotated[str, typer.Option("--spec", "-s", help=_SPEC_HELP, autocompletion=_complete_spec)] = "two-clusters",
    nproc_per_node: Annotated[int, typer.Option(min=1, help="Ranks on each node.")] = 1,
    shuffle_ranks: Annotated[
        int | None, typer.Option(min=0, metavar="SEED", help="Place the ranks over the nodes in this random order.")
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option(min=0.001, help="End everything after this time, with exit code 124.")
    ] = None,
    grace_s: Annotated[
        float, typer.Option(min=0.0, help="How long other ranks may go on after one has failed.")
    ] = 10.0,
    log_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also write each rank's lines, as they are, to FOLDER/RANK.log."),
    ] = None,
    changes: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Change links meanwhile, as this YAML file says (docs/testbed.md)."),
    ] = None,
) -> None:
    """Runs a command on every node, with torchrun's environment variables.

    The exit code is that of the first rank that failed (128 + signal where one ended it), 124 on timeout, 130 on
    Ctrl-C, 2 where the testbed cannot be built.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _exit_on_signal)
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    try:
        testbed = Testbed(spec)
        planned = [] if changes is None else load_changes(changes, testbed.spec)
        stream = LogStream([node.name for node in testbed.spec.nodes], log_dir=log_dir)
        result = testbed.run(
            command,
            nproc_per_node=nproc_per_node,
            on_line=stream,
            timeout_s=timeout_s,
            grace_s=grace_s,
            shuffle_seed=shuffle_ranks,
            changes=planned,
            on_change=lambda change: console.print(f"holmes testbed: after {change.at_s:g} s {change}"),
        )
    except KeyboardInterrupt as error:
        console.print("holmes testbed: interrupted; all ranks were ended", style="red")
        raise typer.Exit(128 + signal.SIGINT) from error
    except BrokenPipeError as error:  # our reader is gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from error
    if result.timed_out:
        console.print(f"holmes testbed: timeout after {timeout_s} s; all ranks were ended", style="red")
    for index, failure in enumerate(result.failures):
        console.print(f"holmes testbed: {'first failure: ' if index == 0 else ''}{failure}", style="red")
    raise typer.Exit(result.returncode)


@app.command(cls=RefusingCommand)
def show(
    spec: Annotated[str, typer.Argument(help=_SPEC_HELP, autocompletion=_complete_spec)] = "two-clusters",
    yaml: Annotated[bool, typer.Option(help="Print the spec's YAML, to start an own one from.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Shows a spec: nodes, NICs, addresses and rates. Runs nothing."""
    loaded = load_spec(spec)
    if yaml:
        source = resources.files("holmes.lab.testbed").joinpath(f"specs/{spec}.yaml")
        typer.echo((source if spec in builtin_specs() else Path(spec)).read_text(encoding="utf-8"), nl=False)
        return
    output.show(json_file, loaded, lambda: output.plain_console().print(_table(loaded)))


@app.command(cls=RefusingCommand)
def check(
    spec: Annotated[str, typer.Argument(help=_SPEC_HELP, autocompletion=_complete_spec)] = "two-clusters",
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure each rate and each loss.")] = 1.0,
    json_file: JsonFile = None,
) -> None:
    """Measures what a spec's links give on this machine: round trip, rate and loss, from every NIC to the next one.

    Right is a median round trip within 5 % or 1 ms, a rate within 2 %, a loss within a tenth of it unless so few
    packets leave that to chance. Exit code: 0 where all is right, 1 where something is not, 2 where the testbed cannot
    be built. A busy machine makes packets late: what is wrong there may be right on a quiet one.
    """
    found = check_testbed(load_spec(spec), seconds)
    output.show(json_file, found, lambda: _print_check(spec, found))
    raise typer.Exit(0 if all(path.is_right for path in found) else 1)


def _print_check(name: str, found: list[CheckedPath]) -> None:
    table = Table(
        "from", "to", "round trip, ms", "Gbit/s", "loss, %", title=name, caption="measured / as the spec says"
    )
    for path in found:
        quantities = (path.round_trip_ms, path.gbps, path.loss_percent)
        table.add_row(path.sender, path.receiver, *(_quantity(quantity) for quantity in quantities))
    output.plain_console().print(table)
    for path in found:
        for sentence in complaints(path):
            output.say(sentence, "  ")


def _quantity(quantity: Quantity) -> Text:
    measured, expected = ("-" if value is None else f"{value:.3g}" for value in (quantity.measured, quantity.expected))
    if quantity.expected is None:
        return Text("not limited")
    return Text(f"{measured} / {expected}", style="" if quantity.is_right else "bold red")


@app.command(cls=RefusingCommand)
def specs(json_file: JsonFile = None) -> None:
    """Lists the built-in specs."""
    table = Table("spec", "nodes", "what it is")
    loaded = {name: load_spec(name) for name in builtin_specs()}
    for name, spec in loaded.items():
        table.add_row(name, str(len(spec.nodes)), spec.description)
    rows = [{"spec": name, "nodes": len(spec.nodes), "description": spec.description} for name, spec in loaded.items()]
    output.show(json_file, rows, lambda: output.plain_console().print(table))


def _table(spec: Spec) -> Table:
    table = Table("node", "NIC", "class", "network", "address", "Gbit/s", "MTU", title=spec.name)
    table.caption = f"{spec.description}. All nodes share network {spec.common_network}."
    table.caption += "".join(f"\n{line}" for line in _link_lines(spec))
    for node in spec.nodes:
        for nic in node.nics:
            first = nic is node.nics[0]
            table.add_row(
                f"{node.cluster}: {node.name}" if first else "",
                f"{nic.name} ({nic.hca})" if nic.hca else nic.name,
                nic.nic_class,
                nic.network,
                str(nic.address) if nic.has_ip else "none",
                "unlimited" if nic.rate_gbps is None else f"{nic.rate_gbps:g}",
                str(nic.mtu),
                end_section=nic is node.nics[-1],
            )
    return table


def _link_lines(spec: Spec) -> list[str]:
    """What links have beside a rate, of networks, their uplinks, and the NICs that differ from their network."""
    links: list[tuple[str, Link]] = []
    for network in spec.networks.values():
        links.append((f"network {network.name}", network))
        links += [(f"each cluster's uplink on {network.name}", network.uplink)] if network.uplink else []
    for node in spec.nodes:
        for nic in node.nics:
            if _link_words(nic) != _link_words(spec.networks[nic.network]):
                links.append((f"{nic.name} of {node.name}", nic))
    return [f"{name}: {words}" for name, link in links if (words := _link_words(link))]


def _link_words(link: Link) -> str:
    words = [f"{link.rate_gbps:g} Gbit/s"] if link.rate_gbps and not isinstance(link, (Nic, NetworkSpec)) else []
    words += [f"receives {link.receive_gbps:g} Gbit/s"] if link.receive_gbps else []
    words += [f"{link.delay_ms:g} ms one way"] if link.delay_ms else []
    words += [f"jitter {link.jitter_ms:g} ms"] if link.jitter_ms else []
    words += [f"loss {link.loss_percent:g} %"] if link.loss_percent else []
    words += [f"reorder {link.reorder_percent:g} %"] if link.reorder_percent else []
    words += [f"queue {link.queue_bytes} bytes"] if link.queue_bytes else []
    return ", ".join(words)


def _exit_on_signal(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")


class LogStream:
    """Prints lines as "[node/rank n] line"; coloured by node on a terminal. Thread safe.

    `log_dir`: a folder, made where it is not there, in which each rank has its file of lines without that prefix. Of an
    earlier run there nothing stays.
    """

    def __init__(self, nodes: list[str], console: Console | None = None, log_dir: Path | None = None) -> None:
        self._log_dir = log_dir
        self._files: dict[int, TextIO] = {}
        if log_dir is not None:
            make_folder(log_dir)
            for old in log_dir.glob("*.log"):
                if old.stem.isdigit():
                    old.unlink()
        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._colours = {node: _COLOURS[index % len(_COLOURS)] for index, node in enumerate(nodes)}
        self._lock = threading.Lock()

    def __call__(self, rank: int, node: str, line: str) -> None:
        """Prints one line of a rank."""
        prefix = f"[{node}/rank {rank}] "
        with self._lock:
            if (file := self._file_of(rank)) is not None:
                file.write(f"{line}\n")
            if self._console.is_terminal:
                self._console.print(Text(prefix, style=self._colours[node]) + Text.from_ansi(line), soft_wrap=True)
            else:
                self._console.file.write(f"{prefix}{line}\n")
                self._console.file.flush()

    def _file_of(self, rank: int) -> TextIO | None:
        if self._log_dir is None:
            return None
        if rank not in self._files:
            self._files[rank] = (self._log_dir / f"{rank}.log").open("w", encoding="utf-8", buffering=1)
        return self._files[rank]
