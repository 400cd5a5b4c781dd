"""Starts MPI on a rank whose network is not its launcher's: an emulated node, a network namespace."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

from holmes.tools.bench.peer import PeerError

#: Descriptor, open in every rank, of the network namespace in which mpirun listens; unset where that is the rank's own.
FD_VARIABLE = "HOLMES_BENCH_JOB_NETWORK_FD"
_CLONE_NEWNET = 0x40000000


def connect_to_launcher() -> Callable[[], None]:
    """Connects PMIx, through which a rank talks to mpirun, from mpirun's network; returns a call for after MPI's end.

    Local, blocking. Sockets stay in the network in which they were made, and PMIx keeps count of its starts: MPI finds
    it started, and makes all connections between ranks in this process's own network. Does nothing where both are one.
    To be called by the thread that starts MPI, after its library was loaded. Raises PeerError.
    """
    descriptor = os.environ.get(FD_VARIABLE)
    if descriptor is None:
        return lambda: None
    try:
        pmix = ctypes.CDLL("libpmix.so.2", mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise PeerError(
            f"MPI on emulated nodes needs Open MPI's libpmix.so.2 where it can be loaded: {error}"
        ) from error
    with _network(int(descriptor)):
        status = pmix.PMIx_Init(None, None, ctypes.c_size_t(0))
    if status != 0:
        raise PeerError(f"PMIx could not reach mpirun (status {status})")
    return lambda: pmix.PMIx_Finalize(None, ctypes.c_size_t(0))


@contextlib.contextmanager
def _network(descriptor: int) -> Iterator[None]:
    """The calling thread, and threads it starts meanwhile, are in the network namespace of this descriptor."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(descriptor)
        try:
            yield
        finally:
            _enter(own)
    finally:
        os.close(own)


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
