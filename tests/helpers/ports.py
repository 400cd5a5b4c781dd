"""Ports for programs that cannot be asked which one they took."""

from __future__ import annotations

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    """Of 127.0.0.1, all different, on which nobody listens."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]
