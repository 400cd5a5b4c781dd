"""Latency and bandwidth between two hosts over one pair of NICs, by plain sockets bound to them."""

from __future__ import annotations

import contextlib
import math
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from holmes.cluster.probe.reach import family
from holmes_comm.errors import UsageError

_CHUNK_BYTES = 1 << 18
ROUND_TRIPS = 11
_INTERVALS = 11
PATIENCE_S = 1.0  # for a stream that stands still, beyond its own time
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Window:
    """How long one direction streams: `warm_s` uncounted (slow start, a shaper's full bucket), then `count_s`."""

    warm_s: float
    count_s: float


class Listener:
    """A listening socket at one local address, for the pair whose turn it is. Strangers are dropped."""

    def __init__(self, address: str, token: str) -> None:
        """Raises OSError where the address cannot be bound."""
        self.token = token
        self._listener = socket.create_server((address, 0), family=family(address), backlog=16)
        self.port: int = self._listener.getsockname()[1]

    def close(self) -> None:
        """Closes it."""
        self._listener.close()

    def admit(self, meeting: str, deadline_s: float) -> dict[str, socket.socket]:
        """The two connections of `meeting`, by direction. Raises TimeoutError at `deadline_s` (monotonic)."""
        found: dict[str, socket.socket] = {}
        try:
            while len(found) < 2:
                self._listener.settimeout(_left_s(deadline_s))
                connection, _ = self._listener.accept()
                try:
                    direction = _hello(connection, self.token, meeting, min(_left_s(deadline_s), PATIENCE_S))
                except (OSError, ValueError):
                    connection.close()
                    continue
                if previous := found.pop(direction, None):
                    previous.close()
                found[direction] = connection
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
        return found


def dial(source: str, target: tuple[str, int], token: str, meeting: str, deadline_s: float) -> dict[str, socket.socket]:
    """The connecting side of `Listener.admit`: both connections, by direction. Raises OSError."""
    found: dict[str, socket.socket] = {}
    try:
        for direction in ("there", "back"):
            connection = socket.create_connection(target, _left_s(deadline_s), source_address=(source, 0))
            found[direction] = connection
            text = f"{meeting}/{direction}".encode()
            connection.sendall(token.encode().ljust(_TOKEN_BYTES) + struct.pack("!H", len(text)) + text)
    except BaseException:
        for connection in found.values():
            connection.close()
        raise
    return found


def measure_dialled(connections: dict[str, socket.socket], window: Window, deadline_s: float) -> tuple[float, float]:
    """The dialling side: round trips, then sends, then receives. Returns Gbit/s received and one-way latency in s."""
    with _closing(connections):
        there, back = connections["there"], connections["back"]
        there.settimeout(_left_s(deadline_s))
        latency_s = _ping(there)
        _send(there, window)
        return _receive(back, window), latency_s


def measure_admitted(connections: dict[str, socket.socket], window: Window, deadline_s: float) -> float:
    """The admitting side. Returns Gbit/s received."""
    with _closing(connections):
        there, back = connections["there"], connections["back"]
        there.settimeout(_left_s(deadline_s))
        _pong(there)
        received_gbps = _receive(there, window)
        _send(back, window)
        return received_gbps


def own_limit_gbps(window: Window) -> float | None:
    """What this host streams to itself: beyond about half of it a measurement says more about hosts than wires."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname(), 1.0)
        receiver, _ = listener.accept()
    thread = threading.Thread(target=_send, args=(sender, window), name="holmes-probe-send", daemon=True)
    thread.start()
    try:
        return _receive(receiver, window)
    except OSError:
        return None
    finally:
        _abort(receiver)
        thread.join()
        sender.close()


def _receive(connection: socket.socket, window: Window) -> float:
    """Gbit/s that arrive after the warm-up; ends the stream by resetting it, which empties the sender's buffer.

    The median over short intervals: one stall of a busy host, or the burst after it, does not count as the wire's.
    Raises OSError where nothing arrives.
    """
    buffer = bytearray(_CHUNK_BYTES)
    connection.settimeout(PATIENCE_S)
    if not connection.recv_into(buffer):
        raise ConnectionError("the peer closed before it sent anything")
    counted_from_s = time.perf_counter() + window.warm_s
    interval_s = window.count_s / _INTERVALS
    received = [0] * _INTERVALS
    while True:
        count = connection.recv_into(buffer)
        interval = math.floor((time.perf_counter() - counted_from_s) / interval_s)
        if not count or interval >= _INTERVALS:
            break
        if interval >= 0:
            received[interval] += count
    _abort(connection)
    if not any(received):
        raise ConnectionError("the stream stood still")
    # A wire so slow that most intervals are empty has no median but a mean.
    typical = statistics.median(received) or statistics.fmean(received)
    return typical * 8e-9 / interval_s


def _send(connection: socket.socket, window: Window) -> None:
    """Sends until the receiver has had enough, or far beyond the time that takes."""
    deadline_s = time.monotonic() + window.warm_s + window.count_s + 2 * PATIENCE_S
    chunk = memoryview(bytes(_CHUNK_BYTES))
    connection.settimeout(PATIENCE_S)
    with contextlib.suppress(OSError):  # its reset is the regular end
        while time.monotonic() < deadline_s:
            connection.send(chunk)
    _abort(connection)


def _ping(connection: socket.socket) -> float:
    """Half of the shortest round trip, in seconds: what queues and busy processors add is not the wire's, and differs
    from one measurement to the next."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips_s = []
    for _ in range(ROUND_TRIPS):
        start_s = time.perf_counter()
        connection.sendall(b"p")
        if not connection.recv(1):
            raise ConnectionError("the peer closed during the round trips")
        trips_s.append(time.perf_counter() - start_s)
    return min(trips_s) / 2


def _pong(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(ROUND_TRIPS):
        if not connection.recv(1):
            raise ConnectionError("the peer closed during the round trips")
        connection.sendall(b"p")


def _hello(connection: socket.socket, token: str, meeting: str, timeout_s: float) -> str:
    """The direction that a connection of `meeting` is for. Raises ValueError or OSError for any other connection."""
    connection.settimeout(timeout_s)
    head = _exactly(connection, _TOKEN_BYTES + 2)
    if head[:_TOKEN_BYTES] != token.encode().ljust(_TOKEN_BYTES):
        raise UsageError("wrong token")
    text = _exactly(connection, struct.unpack("!H", head[_TOKEN_BYTES:])[0]).decode()
    name, _, direction = text.rpartition("/")
    if name != meeting or direction not in ("there", "back"):
        raise UsageError("another meeting's")
    return direction


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = connection.recv(count - len(data))
        if not chunk:
            raise ConnectionError("closed within its greeting")
        data += chunk
    return data


def _abort(connection: socket.socket) -> None:
    """Closes with a reset: what is still buffered is thrown away and does not disturb the next measurement."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextlib.contextmanager
def _closing(connections: dict[str, socket.socket]) -> Iterator[None]:
    try:
        yield
    finally:
        for connection in connections.values():
            _abort(connection)


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the peer did not come in time")
    return left_s
