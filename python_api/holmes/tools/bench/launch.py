"""Starts the ranks of a benchmark as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from typing import Any

from holmes.tools.bench.peer import PeerError
from holmes.tools.bench.peer_mpi import HOW_TO_GET_MPI
from holmes.tools.bench.settings import Output, Settings

# mpirun refuses root without these; they do nothing for others.
MPI_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_POLL_S = 0.05
_STOP_S = 5.0
#: Drawing takes seconds where a machine is busy, or draws for the first time.
_WRITE_S = 60.0


def _serve_store(settings: Settings) -> tuple[Any, int]:
    """Returns a store that this process serves on loopback for its ranks, and its port."""
    if settings.needs_torch:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return store, int(store.port)
    import holmes_comm

    own = holmes_comm.TcpStore("127.0.0.1", 0, True)
    return own, int(own.port)


def launch(settings: Settings, ranks: int, output: Output) -> int:
    """Runs `ranks` processes of `python -m holmes.tools.bench` and returns the first exit status that is not 0, else 0.

    When one rank fails the others are ended: they would wait for it until their deadline.
    """
    store, port = _serve_store(settings)
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 is a client: this process serves
        # Loopback for both: Gloo would take whatever interface the host name leads to.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    arguments = rank_arguments(settings, output)
    if settings.mpi_peers:
        processes = [subprocess.Popen(mpirun([arguments] * ranks), env={**environment, **MPI_ENVIRONMENT})]
    else:
        processes = [
            subprocess.Popen(arguments, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]
    try:
        return _wait(processes)
    except KeyboardInterrupt:
        _end_early(processes)
        raise
    finally:
        _stop(processes)
        del store


def rank_arguments(settings: Settings, output: Output) -> list[str]:
    """Returns the command of every rank."""
    return [sys.executable, "-m", "holmes.tools.bench", settings.to_json(), output.to_json()]


def find_mpirun() -> str | None:
    """Returns the path of mpirun: that of the interpreter's environment, which goes with its mpi4py, else PATH's."""
    return shutil.which("mpirun", path=sysconfig.get_path("scripts")) or shutil.which("mpirun")


def mpirun(rank_commands: Sequence[Sequence[str]]) -> list[str]:
    """Returns the command that starts one rank with each of these as one MPI job, unbound as our own ranks are.

    Raises PeerError where there is no mpirun.
    """
    program = find_mpirun()
    if program is None:
        raise PeerError(f"there is no mpirun on PATH; {HOW_TO_GET_MPI}")
    # Ranks that share cores yield while they wait. Without need the option would make the others yield too.
    shared = ["--oversubscribe"] if len(rank_commands) > len(os.sched_getaffinity(0)) else []
    line = [program, "--bind-to", "none", *shared]
    for index, command in enumerate(rank_commands):
        line += [*([":"] if index else []), "-n", "1", *command]
    return line


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    """Returns 0 when all have ended well, else the status of the first that has not, at once."""
    while True:
        states = [process.poll() for process in processes]
        failed = [state for state in states if state]
        if failed or None not in states:
            return failed[0] if failed else 0
        time.sleep(_POLL_S)


def _end_early(processes: list[subprocess.Popen[bytes]]) -> None:
    """Tells those that the terminal has not told, and waits for rank 0, or mpirun, which has something to write."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        processes[0].wait(_WRITE_S)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ends what still runs: politely, then not."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
