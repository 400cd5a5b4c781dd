"""`holmes store`."""

from __future__ import annotations

from typing import Annotated

import typer


def store(
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0: a free one, which is printed.")] = 29400,
) -> None:
    """Serve the store of an elastic job (docs/recovery.md), until it is ended.

    Start it on a host that outlives those that train, and give them HOLMES_STORE=host:port. Everybody who reaches the
    port can end the job: keep it inside the cluster's network.
    """
    from holmes.training.recovery.store import serve_store

    try:
        serve_store(port, lambda used: typer.echo(f"serving the store on port {used}"))
    except OSError as error:
        typer.echo(f"holmes store: {error}", err=True)
        raise typer.Exit(2) from None
