"""The job's store as a process of its own, on a host that outlives the ones that train."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable


def serve_store(port: int, on_ready: Callable[[int], None] = lambda port: None) -> None:
    """Serves torch's TCPStore on all addresses until SIGTERM or SIGINT. `port` 0: a free one; `on_ready` gets it.

    Raises OSError where the port is taken.
    """
    from torch.distributed import DistNetworkError, TCPStore

    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    try:
        store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except DistNetworkError as error:
        raise OSError(f"cannot serve a store on port {port}: {error}; choose another with --port") from error
    on_ready(store.port)
    done.wait()
