"""The `holmes` command: one module for each subcommand."""

from holmes.tools.cli.command import app, load, main

__all__ = ["app", "load", "main"]
