"""`holmes store`."""

from __future__ import annotations

from typing import Annotated

import typer


def store(
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0: a free one, which is printed.")] = 29400,
    listen: Annotated[
        str, typer.Option(help="This host's address in the cluster's network; 0.0.0.0: all. Default: this host only.")
    ] = "127.0.0.1",
) -> None:
    """Serve the store of an elastic job (docs/recovery.md), until it is ended.

    Start it on a host that outlives those that train, with --listen and its address in the cluster's network, and give
    them HOLMES_STORE=host:port. Give it and them the same HOLMES_SECRET or HOLMES_SECRET_FILE, which every connection
    then proves; without one, everybody who reaches the port can end the job.
    """
    from holmes.training.recovery.store import serve_store

    serve_store(port, lambda used: typer.echo(f"serving the store on {listen}, port {used}"), listen)
