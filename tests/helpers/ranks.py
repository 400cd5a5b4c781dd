"""Ranks as threads of one process over an in-memory store: fast, and every rank's error is seen."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import holmes_comm

_names = itertools.count()


def run_threads(size: int, body: Callable[[int], Any], *, timeout_s: float = 120.0) -> list[Any]:
    """``body(rank)`` in ``size`` threads; their results by rank. The first rank's exception is raised; a hang fails."""
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(timeout_s)
        assert not thread.is_alive(), f"rank {rank} hangs"
    for error in errors:
        if error is not None:
            raise error
    return results


def run_communicators(
    size: int, body: Callable[[Any], Any], *, transport: str = "tcp", timeout_s: float = 60.0
) -> list[Any]:
    """``body(communicator)`` on every one of ``size`` thread ranks on loopback; transport "tls": TCP, all encrypted."""
    store = holmes_comm.LocalStore()
    name = f"test{next(_names)}"
    options: dict[str, Any] = {"transport": transport}
    if transport == "tls":
        options = {"transport": "tcp", "tls": "all", "secret": "the secret of the tests"}

    def rank_body(rank: int) -> Any:
        comm = holmes_comm.init(store, rank, size, name=name, timeout_s=timeout_s, connect_timeout_s=20.0, **options)
        assert transport != "tls" or all(one["encryption"] for one in comm.connections())
        return body(comm)

    return run_threads(size, rank_body, timeout_s=timeout_s + 60)


def outcomes(size: int, body: Callable[[Any], Any], *, transport: str = "tcp", timeout_s: float = 60.0) -> list[Any]:
    """As run_communicators, but a rank's exception becomes its result."""

    def caught(comm: Any) -> Any:
        try:
            return body(comm)
        except Exception as error:
            return error

    return run_communicators(size, caught, transport=transport, timeout_s=timeout_s)
