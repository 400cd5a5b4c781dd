"""`holmes build-torch`: the torch.distributed backend for a torch that the installed package does not know."""

from __future__ import annotations

import typer

from holmes_comm import c10d_module


def build_torch() -> None:
    """Compiles Holmes' torch.distributed backend for the torch that is installed here, into the user's cache.

    Needed once, where the package has none for this version of torch; `pip install cmake ninja` and a C++ compiler are
    what it takes. Where home folders are not shared: on each host.
    """
    typer.echo(f"built {c10d_module.build(typer.echo)}")
