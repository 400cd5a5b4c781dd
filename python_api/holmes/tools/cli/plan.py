"""`holmes plan`: what a plan says, the proof that groups keep to their networks, a plan in a framework's words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from holmes import files
from holmes.cluster.topology import Topology
from holmes.cluster.topology.fields import Entry
from holmes.planning.groups.rank_grid import KINDS
from holmes.planning.plan.file import KIND
from holmes.planning.plan.plan import Plan
from holmes.planning.plan.proof import GroupLists, Proof, check
from holmes.tools.cli.output import JsonFile, plain_console, say, show
from holmes.tools.cli.plan_search import explain, search
from holmes.tools.cli.refusal import RefusingCommand, RefusingGroup
from holmes.training.integrations.export import FORMATS, export_plan
from holmes.training.integrations.launch_files import write_launch_files
from holmes.training.integrations.start_order import hosts_in_order
from holmes.words import count, from_text
from holmes_comm.errors import UsageError

app = typer.Typer(
    cls=RefusingGroup,
    no_args_is_help=True,
    help="Plans: the search for the fastest one, what they say, and their proof.",
)
app.callback(invoke_without_command=True)(search)
app.command("explain", cls=RefusingCommand)(explain)


@app.command("show", cls=RefusingCommand)
def show_plan(
    plan: Annotated[Path, typer.Argument(help="A saved plan, .yaml or .json.")],
    kind: Annotated[str | None, typer.Option(help="List every group of this kind: tp, dp, pp, ...")] = None,
    rank: Annotated[int | None, typer.Option(help="List every group that this rank is in.")] = None,
    json_file: JsonFile = None,
) -> None:
    """A plan in a few lines; with --kind or --rank the groups, their NICs and why."""
    loaded = Plan.load(plan)
    if rank is not None:
        groups = [loaded.group_of(kind, rank)] if kind else list(loaded.groups_of(rank))
    else:
        groups = list(loaded.groups(kind)) if kind else []
    text = "\n".join(f"{group.kind} {list(group.ranks)}: {group.reason}" for group in groups) or loaded.describe()
    listed = [
        {"kind": group.kind, "ranks": group.ranks, "nics": group.nics, "reason": group.reason} for group in groups
    ]
    show(json_file, {"groups": listed} if kind or rank is not None else loaded.to_dict(), lambda: say(text, "  "))


@app.command("check", cls=RefusingCommand)
def check_groups(
    plan: Annotated[
        Path, typer.Argument(help="A saved plan, or a file with `groups:`, lists of ranks by kind, of another trainer.")
    ],
    topology: Annotated[Path, typer.Option(help="The machines (`holmes topology --save`).")],
    json_file: JsonFile = None,
) -> None:
    """Prove that tensor groups stay on hosts, data-parallel groups in clusters, and only pipeline and few others cross.

    Exit code 1, with what is wrong, what it costs and the nearest fix, where the proof fails; 2 for files that cannot
    be used.
    """
    proof = check(files.load_as(plan, _plan_or_groups), Topology.load(topology))
    show(json_file, {"holds": proof.holds, **files.plain(proof)}, lambda: print_proof(plain_console(), proof))
    raise typer.Exit(0 if proof.holds else 1)


def print_proof(console: Console, proof: Proof) -> None:
    """The rows as a table, then what is wrong and the fix."""
    table = Table(title="Groups", title_justify="left")
    for column in ("kind", "groups", "networks", "crossing", "must be", "proof"):
        table.add_column(column, justify="right" if column == "crossing" else "left")
    for row in proof.rows:
        state = f"{row.wrong} wrong" if row.wrong else "holds"
        count = f"{row.groups} of {row.ranks}"
        table.add_row(row.kind, count, row.networks.replace(", ", "\n"), str(row.crossing), row.rule, state)
    console.print(table)
    lines = proof.describe().splitlines()[len(proof.rows) :]
    say("\n".join(lines or ["Every group keeps to its rule."]), "  ")


def _plan_or_groups(data: Mapping[str, Any]) -> Plan | GroupLists:
    """A plan, or the lists under `groups`; ranks of a group as a list or as text such as 0-14:2."""
    if data.get("kind") == KIND:
        return Plan.from_dict(data)
    if not isinstance(data.get("groups"), dict):
        raise UsageError(
            f"neither a plan (kind: {KIND}) nor a file of groups such as {{groups: {{dp: [[0, 2], 1-3:2]}}}}"
        )
    top = Entry(data["groups"], "groups", KINDS)
    return {kind: [_ranks(where, ranks) for where, ranks in top.items(kind)] for kind in data["groups"]}


def _ranks(where: str, ranks: Any) -> tuple[int, ...]:
    """A bare number is refused: [0, 8] may be meant as one group or as two."""
    if isinstance(ranks, str):
        return from_text(ranks)
    if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
        raise UsageError(
            f"{where} is {ranks!r}; a group must be a list of ranks such as [0, 8], or text such as 0-14:2 "
            "(groups of one kind: [[0, 8], [1, 9]])"
        )
    return tuple(ranks)


@app.command("export", cls=RefusingCommand)
def export(
    plan: Annotated[Path, typer.Argument(help="A saved plan, .yaml or .json.")],
    to: Annotated[str, typer.Option(help=f"One of {', '.join(FORMATS)}.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A folder: write launch script, host file and the trainer's settings."),
    ] = None,
) -> None:
    """Print a plan as Megatron-LM arguments, DeepSpeed or torchtitan settings, or FlagScale's YAML.

    With --output a folder with all that starts it: launch.sh, which numbers ranks in the plan's order, and what it
    reads.

    They hold for ranks numbered in the plan's order; where ranks are numbered otherwise, standard error says in which
    order to start hosts for that.
    """
    loaded = Plan.load(plan)
    if output is not None:
        typer.echo("\n".join(map(str, write_launch_files(loaded, to, output))))
        return
    text = export_plan(loaded, to)
    hosts = [] if to == "json" or loaded.order == tuple(range(loaded.world_size)) else hosts_in_order(loaded)
    if hosts:
        listed = ", ".join(f"{host} ({count(ranks, 'rank')})" for host, ranks in hosts)
        typer.echo(f"start hosts in this order: {listed}", err=True)
    typer.echo(text, nl=False)
