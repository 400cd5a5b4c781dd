"""The Holmes communication library: NICs, communicators bound to them, and the c10d backend "holmes".

    import holmes_comm
    comm = holmes_comm.init(store, rank, size, nics=holmes_comm.NicSelection(nic_class="infiniband"))
    comm.all_reduce(array)

Importing it also makes ``torch.distributed.init_process_group("holmes")`` work, where torch is installed. Names are
loaded on first use: torch imports this package when it starts, and must not pay for (or depend on) the engine.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holmes_comm._C import (
        AtomicStore,
        Communicator,
        CommunicatorOptions,
        Compression,
        LocalStore,
        NcclCommunicator,
        NcclGroup,
        NcclProfile,
        PrefixStore,
        Store,
        TcpStore,
        Work,
    )
    from holmes_comm.clusters import GroupOptions
    from holmes_comm.communicator import init
    from holmes_comm.compression import compressed
    from holmes_comm.errors import (
        AbortedError,
        CommunicatorError,
        HolmesError,
        IntegrityError,
        JobError,
        MismatchError,
        NicError,
        PeerLostError,
        ProtocolError,
        SystemError,
        TimeoutError,
        UnreachableError,
        UsageError,
    )
    from holmes_comm.nccl_options import NcclSettings
    from holmes_comm.nics import Nic, NicSelection, discover_nics
    from holmes_comm.process_metrics import Metrics, metrics
    from holmes_comm.recorder import flight_record
    from holmes_comm.shared import empty, shared_tensors

__all__ = [
    "AbortedError",
    "AtomicStore",
    "Communicator",
    "CommunicatorError",
    "CommunicatorOptions",
    "Compression",
    "GroupOptions",
    "HolmesError",
    "IntegrityError",
    "JobError",
    "LocalStore",
    "Metrics",
    "MismatchError",
    "NcclCommunicator",
    "NcclGroup",
    "NcclProfile",
    "NcclSettings",
    "Nic",
    "NicError",
    "NicSelection",
    "PeerLostError",
    "PrefixStore",
    "ProtocolError",
    "Store",
    "SystemError",
    "TcpStore",
    "TimeoutError",
    "UnreachableError",
    "UsageError",
    "Work",
    "compressed",
    "discover_nics",
    "empty",
    "flight_record",
    "init",
    "metrics",
    "shared_tensors",
]

__version__ = "0.1.0"

_HOMES = {
    "clusters": ("GroupOptions",),
    "nccl_options": ("NcclSettings",),
    "_C": (
        "AtomicStore",
        "Communicator",
        "CommunicatorOptions",
        "Compression",
        "LocalStore",
        "NcclCommunicator",
        "NcclGroup",
        "NcclProfile",
        "PrefixStore",
        "Store",
        "TcpStore",
        "Work",
    ),
    "communicator": ("init",),
    "compression": ("compressed",),
    "nics": ("Nic", "NicSelection", "discover_nics"),
    "process_metrics": ("Metrics", "metrics"),
    "recorder": ("flight_record",),
    "shared": ("empty", "shared_tensors"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "errors")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _check_interpreter() -> None:
    """Raises ImportError in an interpreter whose lock the engine's module would wait for without end."""
    if sys.version_info >= (3, 12):  # later ones work, or say so themselves
        return
    import _xxsubinterpreters as interpreters  # type: ignore[import-not-found, unused-ignore]

    if interpreters.get_current() != interpreters.get_main():
        raise ImportError(
            "Holmes works in Python's main interpreter only, before Python 3.12; call it there (mod_wsgi: "
            "WSGIApplicationGroup %{GLOBAL})"
        )


_check_interpreter()
if "torch" in sys.modules:
    from holmes_comm import torch_backend

    torch_backend.autoload()
