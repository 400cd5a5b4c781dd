"""Ports of this machine that nobody listens on."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import ExitStack

_FIRST, _LAST = 20_000, 30_000  # below what the system gives to whoever does not ask for one
_tries = itertools.count(os.getpid() * 37)  # tests beside this one begin elsewhere


def free_ports(count: int) -> list[int]:
    """So many in a row. Whoever is faster may take them, so ask just before use."""
    for attempt in itertools.islice(_tries, 1000):
        first = _FIRST + attempt * count % (_LAST - _FIRST - count)
        with ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return list(range(first, first + count))
    raise AssertionError(f"no {count} free ports in a row")


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]
