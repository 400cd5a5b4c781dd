"""`holmes plan export`: a plan in a framework's words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holmes.planning.plan.plan import Plan
from holmes.training.integrations.export import FORMATS, export_plan
from holmes.training.integrations.start_order import hosts_in_order


def export(
    plan: Annotated[Path, typer.Argument(help="A saved plan, .yaml or .json.")],
    to: Annotated[str, typer.Option(help=f"One of {', '.join(FORMATS)}.")],
) -> None:
    """Print a plan as Megatron-LM arguments, DeepSpeed or torchtitan settings, or FlagScale's YAML.

    They hold for ranks numbered in the plan's order; where ranks are numbered otherwise, standard error says in which
    order to start hosts for that.
    """
    try:
        loaded = Plan.load(plan)
        text = export_plan(loaded, to)
        hosts = [] if to == "json" or loaded.order == tuple(range(loaded.world_size)) else hosts_in_order(loaded)
    except (ValueError, OSError) as error:
        typer.echo(f"holmes plan export: {error}", err=True)
        raise typer.Exit(2) from None
    if hosts:
        listed = ", ".join(f"{host} ({ranks} rank{'s' if ranks > 1 else ''})" for host, ranks in hosts)
        typer.echo(f"start hosts in this order: {listed}", err=True)
    typer.echo(text, nl=False)
