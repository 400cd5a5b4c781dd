"""The metrics of this process over HTTP, on loopback unless told otherwise: /metrics for Prometheus, /metrics.json."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from holmes_comm.errors import UsageError
from holmes_comm.process_metrics import metrics

__all__ = ["serve_metrics", "start_from_environment"]

_log = logging.getLogger(__name__)
_VARIABLE = "HOLMES_METRICS_PORT"
_ADDRESS = "HOLMES_METRICS_ADDRESS"
_MOST_CONNECTIONS = 64  # each holds a thread and a descriptor of the job
_NO_DESCRIPTOR_S = 0.1
_started_by: int | None = None  # process that has done what the environment says


class _Handler(BaseHTTPRequestHandler):
    timeout = 5.0

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            body, kind = metrics().to_prometheus(), "text/plain; version=0.0.4; charset=utf-8"
        elif path == "/metrics.json":
            body, kind = metrics().to_json(), "application/json"
        else:
            self.send_error(404, "there is /metrics and /metrics.json")
            return
        data = body.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_HEAD = do_GET  # health checks

    def log_message(self, format: str, *args: object) -> None:
        _log.debug(format, *args)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = _MOST_CONNECTIONS

    def __init__(self, address: str, port: int) -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}  # in the order in which they came
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # no descriptor is left: the connection waits on, and the server would try again at once
            time.sleep(_NO_DESCRIPTOR_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            if len(self._open) > _MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # socketserver prints a traceback, also where a scraper or a health check has only gone away.
        level = logging.DEBUG if isinstance(sys.exc_info()[1], OSError) else logging.WARNING
        _log.log(level, "metrics: the request of %s failed", client_address[0], exc_info=True)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:  # "::" is all IPv4 addresses too
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)  # without HTTPServer's question for this address's name, which may take long


def serve_metrics(port: int, address: str = "127.0.0.1") -> ThreadingHTTPServer:
    """Serves them at `address`, an IP address of this host, and `port` (0: a free one) on a thread of its own. Local.

    `shutdown()` ends it. Raises OSError where the port is taken or the address is no host's.
    """
    server = _Server(address, port)
    threading.Thread(target=server.serve_forever, name="holmes-metrics", daemon=True).start()
    return server


def place_from_environment() -> tuple[str, int] | None:
    """HOLMES_METRICS_ADDRESS and HOLMES_METRICS_PORT + LOCAL_RANK; None where no port is set. Local.

    Raises UsageError where a variable is no port, or no IP address.
    """
    text = os.environ.get(_VARIABLE, "")
    if not text:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise UsageError(
            f"{_VARIABLE}={text!r} is not allowed: it must be a port from 1 to 65535; say for example 9400"
        )
    address = os.environ.get(_ADDRESS, "") or "127.0.0.1"
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise UsageError(
            f"{_ADDRESS}={address!r} is not allowed: it must be an IP address of this host; say for example 0.0.0.0"
        ) from None
    local_rank = os.environ.get("LOCAL_RANK", "0")
    return address, int(text) + (int(local_rank) if local_rank.isdecimal() else 0)


def start_from_environment() -> None:
    """Serves them at HOLMES_METRICS_PORT + LOCAL_RANK where that is set, once per process. Local.

    A port that is taken is a warning: it must not end a job. Raises UsageError as `place_from_environment`.
    """
    global _started_by
    if _started_by == os.getpid() or (place := place_from_environment()) is None:
        return
    address, port = place
    _started_by = os.getpid()
    try:
        serve_metrics(port, address)
    except (OSError, OverflowError) as error:
        _log.warning("no metrics at %s port %d (%s + LOCAL_RANK): %s", address, port, _VARIABLE, error)
