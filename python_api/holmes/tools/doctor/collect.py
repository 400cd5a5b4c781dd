"""Collects one rank's facts. Local, without root; what cannot be read is reported as unknown."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import resource
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from holmes.tools.doctor.collect_nics import collect_nics
from holmes.tools.doctor.facts import RankFacts
from holmes_comm import _C, HolmesError
from holmes_comm.metrics_server import place_from_environment

_MOST_OPEN_FILES = 65536

#: Variables with these beginnings steer communication.
PREFIXES = ("HOLMES_", "NCCL_", "GLOO_", "TP_SOCKET_", "UCX_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "MASTER_")
_TCP = Path("/proc/sys/net/ipv4")


def collect(rank: int) -> RankFacts:
    """Local. What this process and its host say of themselves."""
    variables = {name: _shown(name, value) for name, value in os.environ.items() if name.startswith(PREFIXES)}
    return RankFacts(
        rank=rank,
        host=_C.host_name(),
        host_id=_C.host_identity(),
        nics=collect_nics(),
        variables=dict(sorted(variables.items())),
        hostname_addresses=_addresses_of(socket.gethostname()),
        memlock_limit_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files_limit=_open_files_limit(),
        open_files=len(os.listdir("/proc/self/fd")),
        shm_free_bytes=_free_bytes("/dev/shm"),
        memfd_error=_memfd_error(),
        tcp_read_max_bytes=_last_number(_TCP / "tcp_rmem"),
        tcp_write_max_bytes=_last_number(_TCP / "tcp_wmem"),
        congestion_control=_text(_TCP / "tcp_congestion_control"),
        nccl_version=_nccl_version(),
        holmes_version=_package_version("holmes-comm"),
        torch_version=_package_version("torch"),
        selection_error=_selection_error(os.environ),
        variables_error=_variables_error(),
        emulated="HOLMES_TESTBED" in os.environ,
    )


def _shown(name: str, value: str) -> str:
    return "(not shown)" if name == "HOLMES_SECRET" else value


def _addresses_of(name: str) -> list[str]:
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def _limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _open_files_limit() -> int:
    """What the engine raises the soft limit to when it needs sockets (csrc/holmes/core/descriptors.hpp)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    return max(soft, raised)


def _free_bytes(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else None
    except OSError:
        return None


def _memfd_error() -> str:
    """Why shared memory as the engine makes it cannot be had; empty where it can."""
    try:
        descriptor = os.memfd_create("holmes-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError) as error:
        return str(error)
    try:
        os.posix_fallocate(descriptor, 0, 1 << 20)
    except OSError as error:
        return str(error)
    finally:
        os.close(descriptor)
    return ""


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _last_number(path: Path) -> int | None:
    words = (_text(path) or "").split()
    return int(words[-1]) if words else None


def _nccl_version() -> str | None:
    """Of the NCCL that would be loaded: the variable's, else the Python package's, else the system's."""
    for name in _nccl_libraries():
        with contextlib.suppress(OSError, AttributeError):
            number = ctypes.c_int()
            if ctypes.CDLL(name).ncclGetVersion(ctypes.byref(number)) == 0:
                code = number.value  # 21805 is 2.18.5; before 2.9 it was 2804 for 2.8.4
                major, rest = divmod(code, 10000) if code >= 10000 else divmod(code, 1000)
                return f"{major}.{rest // 100}.{rest % 100}"
    return None


def _nccl_libraries() -> list[str]:
    from holmes_comm.nccl_agreement import nccl_package_paths

    told = os.environ.get("HOLMES_NCCL_LIBRARY")
    return [told] if told else [*nccl_package_paths(), "libnccl.so.2"]


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _variables_error() -> str:
    """Why no communicator can be made with the environment's variables; empty where one can."""
    return _error_of(_C.check_environment) or _error_of(place_from_environment)


def _selection_error(variables: Mapping[str, str]) -> str:
    """Why the environment's NIC selection fits nothing here; empty where it fits or there is none."""
    from holmes_comm import NicSelection, discover_nics

    if not variables.get("HOLMES_NICS"):
        return ""
    return _error_of(lambda: NicSelection.from_env(variables).resolve(discover_nics()))


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except HolmesError as error:
        return str(error)
    return ""
