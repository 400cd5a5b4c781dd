"""The job's store: as a process of its own, and as a generation sees it.

For a generation its waits end when that fails: setting up process groups then ends too, on every rank.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from holmes.training.recovery.errors import GenerationFailed
from holmes_comm import TcpStore
from holmes_comm.errors import SystemError, UsageError

LOOPBACK = "127.0.0.1"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02


class AskingStore(dist.Store):
    """torch's store interface where who waits asks with `check`, again and again: so a wait can be interrupted."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """As dist.Store."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline_s, pause_s = time.monotonic() + limit_s, _FIRST_PAUSE_S
        while not self.check(keys):
            if time.monotonic() >= deadline_s:
                raise dist.DistStoreError(f"nobody set {', '.join(map(repr, keys))} in the store within {limit_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def set_timeout(self, timeout: timedelta) -> None:
        """As dist.Store."""
        self._timeout_s = timeout.total_seconds()


class InterruptibleStore(AskingStore):
    """`inner`, for one generation: every call raises GenerationFailed once `failure()` gives a reason. Thread safe."""

    def __init__(self, inner: dist.Store, failure: Callable[[], str | None], timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._inner, self._failure = inner, failure

    def set(self, key: str, value: Any) -> None:
        """As dist.Store."""
        self._check()
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """As dist.Store."""
        self.wait([key])
        return self._inner.get(key)

    def add(self, key: str, amount: int) -> int:
        """As dist.Store."""
        self._check()
        return self._inner.add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """As dist.Store."""
        self._check()
        return self._inner.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        """As dist.Store."""
        self._check()
        return self._inner.check(keys)

    def delete_key(self, key: str) -> bool:
        """As dist.Store."""
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        """As dist.Store."""
        return self._inner.num_keys()

    def _check(self) -> None:
        reason = self._failure()
        if reason is not None:
            raise GenerationFailed(reason)


def parse_host_port(address: str) -> tuple[str, int]:
    """(host, port) of "host:port", "[::1]:port" too. Raises UsageError where it is not of that form."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(
            f"the store's address {address!r} must be host:port, for example head:29400, or etcd://host:port,... with "
            "the members of an etcd"
        )
    return host.strip("[]"), int(port)


def serve_store(port: int, on_ready: Callable[[int], None] = lambda port: None, address: str = LOOPBACK) -> None:
    """Serves a TcpStore on this address until SIGTERM or SIGINT. `port` 0: a free one; `on_ready` gets it.

    `address`: one of this host's, 0.0.0.0 or ::: all. Whoever comes must prove HOLMES_SECRET (or HOLMES_SECRET_FILE);
    where there is none nobody is asked who he is, so by default only this host reaches it. Raises OSError where the
    port is taken or the address is not this host's, UsageError where the address has a port in it.
    """
    host, _, after = address.rpartition(":")
    if host and ":" not in host and after.isdigit():
        raise UsageError(f"the store's address {address!r} has a port in it; give --listen {host} --port {after}")
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    try:
        store = TcpStore(address, port, is_server=True)
    except SystemError as error:
        raise OSError(
            f"cannot serve a store on {address}, port {port}: {error}; choose another port with --port, or an address "
            "of this host with --listen"
        ) from error
    on_ready(store.port)
    done.wait()
