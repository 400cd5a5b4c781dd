"""What a launcher's environment says of this process: rank, size, and where the ranks meet.

``torchrun``, Ray Train, Kubernetes' PyTorchJob and whatever else sets RANK and WORLD_SIZE; Kubernetes' Jobs with an
index (JobSet); ``srun`` alone; ``mpirun`` of Open MPI; ``mpiexec`` of MPICH and others with PMI. Where several are
there, the innermost counts: what torchrun sets, then MPI, then Slurm, which may have started the other two. A recipe
for each: docs/launchers.md.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from holmes_comm.errors import UsageError

__all__ = ["Launch", "recognize", "set_environment"]

_TORCHRUN = "torchrun"
_WAIT_S = 300.0  # TcpStore's
_KUBERNETES_JOB = "Kubernetes Job"
_PORT = 29500  # torchrun's
_PORTS = 20000  # of those from 10000 on, for jobs that have a number: two jobs of one host differ


@dataclass(frozen=True)
class Launch:
    """This process's place in its job. Immutable.

    launcher: who started it, in words. rank, size: of the job. local_rank, local_size: on this host; None: not said.
    address, port: where rank 0 serves the store; None: not said, as mpirun over several hosts does not.
    is_served: whether the launcher serves that store itself.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    address: str | None
    port: int | None
    is_served: bool = False

    def environment(self) -> dict[str, str]:
        """The same as torchrun's variables; without what is not said."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    def store_address(self) -> tuple[str, int]:
        """Address and port of the job's store. Raises UsageError where the launcher does not say them."""
        if self.port is None or (self.address is None and self.launcher not in _WITHOUT_ADDRESS):
            missing = "MASTER_ADDR" if self.address is None else "MASTER_PORT"
            fix = "start the job with torchrun"
            if self.launcher == _KUBERNETES_JOB:
                fix = "name it in the manifest (MASTER_ADDR: pod 0, JOBSET-JOB-0-0.JOBSET in a JobSet)"
            raise UsageError(f"WORLD_SIZE is set, but not {missing}; {fix}")
        if self.port == 0 and self.size > 1:
            raise UsageError(
                "MASTER_PORT=0 is any free port, which only rank 0 would know; give all ranks the same one"
            )
        if self.address is None:
            raise UsageError(
                f"{self.launcher} started {self.size} ranks on several hosts and does not say where they meet; set "
                "MASTER_ADDR to rank 0's host on all (mpirun -x MASTER_ADDR=HOST, mpiexec -genv MASTER_ADDR HOST)"
            )
        return self.address, self.port

    def open_store(self, timeout_s: float, secret: str = "", *, may_serve: bool = True) -> Any:
        """The job's store, of which every rank makes one: torch's where torchrun serves it, else a TcpStore.

        Waits up to `timeout_s` seconds for who serves: rank 0 (unless `may_serve` is False) or the launcher. Waits in
        it that say no time end after five minutes.
        secret: the job's, as :class:`TcpStore`. Raises as store_address and TcpStore, RuntimeError as torch's TCPStore.
        """
        host, port = self.store_address()
        if self.launcher == _TORCHRUN and self.is_served:
            from torch.distributed import PrefixStore, TCPStore

            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
            store.set_timeout(timedelta(seconds=_WAIT_S))
            return PrefixStore(f"holmes/attempt_{attempt}", store)
        from holmes_comm._C import TcpStore

        is_server = may_serve and self.rank == 0 and not self.is_served
        return TcpStore(host, port, is_server=is_server, timeout_s=timeout_s, secret=secret)


def recognize(environ: Mapping[str, str] | None = None) -> Launch | None:
    """This process's place by the environment (None: os.environ), or None where no launcher started it. Local.

    A single process of srun or mpirun is no job: it may be a shell that somebody works in. Raises UsageError where the
    variables contradict each other.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _from_torchrun(environ)
    for name, rank, size, local_rank, local_size, job in _MPI:
        if rank in environ and size in environ:
            return _of_mpi(environ, name, (rank, size, local_rank, local_size), job)
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:  # srun's; a batch script has only the first
        return _from_slurm(environ)
    if "WORLD_SIZE" in environ:
        # What is missing is said there, or it is the index that Kubernetes gives to each pod of a Job.
        index = environ.get("JOB_COMPLETION_INDEX")
        return _from_torchrun(environ if index is None else {**environ, "RANK": index})
    return None


def set_environment() -> Launch | None:
    """Sets torchrun's variables where they are not set, as `recognize` finds them: then
    ``torch.distributed.init_process_group("holmes")`` needs no arguments under srun and mpirun either. Local, before
    it. Returns and raises as `recognize`."""
    found = recognize()
    for name, value in (found.environment() if found is not None else {}).items():
        os.environ.setdefault(name, value)
    return found


#: Launcher; its rank, size, local rank, local size; what names its job. The first that is there counts.
_MPI = (
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_JOBID",)),
)

_WITHOUT_ADDRESS = ("Slurm", *(row[0] for row in _MPI))


def _from_torchrun(environ: Mapping[str, str]) -> Launch:
    try:
        rank, size = (int(environ[name]) for name in ("RANK", "WORLD_SIZE"))
        port, local_rank, local_size = (
            _optional(environ, name) for name in ("MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
    except KeyError as error:
        raise UsageError(f"WORLD_SIZE is set, but not {error.args[0]}; start the job with torchrun") from None
    except ValueError as error:
        raise UsageError(f"RANK, WORLD_SIZE and MASTER_PORT must be numbers: {error}") from None
    _check(rank, size, "RANK", "WORLD_SIZE", "start the job with torchrun")
    if "TORCHELASTIC_RUN_ID" in environ:
        launcher = _TORCHRUN
    elif "HOLMES_TESTBED" in environ:
        launcher = "holmes testbed"
    elif "RAY_JOB_ID" in environ:
        launcher = "Ray Train"
    elif environ.get("JOB_COMPLETION_INDEX") == environ["RANK"]:
        launcher = _KUBERNETES_JOB
    else:
        launcher = "Kubernetes" if "KUBERNETES_SERVICE_HOST" in environ else "RANK and WORLD_SIZE"
    address = environ.get("MASTER_ADDR") or None
    return Launch(launcher, rank, size, local_rank, local_size, address, port, _is_served(environ))


def _of_mpi(
    environ: Mapping[str, str], launcher: str, names: tuple[str, str, str, str], job: tuple[str, ...]
) -> Launch | None:
    rank, size, local_rank, local_size = (_number(environ, name) for name in names)
    assert rank is not None
    assert size is not None
    _check(rank, size, names[0], names[1], "start the job with mpirun")
    if size == 1 and "WORLD_SIZE" not in environ:
        return None
    job_name = next((environ[name] for name in job if name in environ), None)
    # Only a job on one host has an address that all ranks know.
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if local_size == size else None)
    port = _port(environ, job_name)
    return Launch(launcher, rank, size, local_rank, local_size, address, port, _is_served(environ))


def _from_slurm(environ: Mapping[str, str]) -> Launch | None:
    rank, size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
    assert rank is not None
    assert size is not None
    _check(rank, size, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "start the job with srun")
    if size == 1 and "WORLD_SIZE" not in environ:
        return None
    counts = task_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environ, "SLURM_NODEID") or 0
    local_size = counts[node] if node < len(counts) else None
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    address = environ.get("MASTER_ADDR") or (first_host(hosts) if hosts else None)
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    local_rank, port = _number(environ, "SLURM_LOCALID"), _port(environ, job)
    return Launch("Slurm", rank, size, local_rank, local_size, address, port, _is_served(environ))


def first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes: "gpu[003-007,9],login" -> "gpu003". Raises UsageError for another text."""
    match = re.match(r"([^\[\],\s]+)(?:\[([^\[\],\s-]+)[^\]]*\]([^\[\],\s]*))?", nodes)
    if match is None or nodes.count("[") != nodes.count("]"):
        raise UsageError(f"SLURM_STEP_NODELIST={nodes!r} is no list of nodes such as gpu[003-007]; set MASTER_ADDR")
    return "".join(part or "" for part in match.groups())


def task_counts(text: str) -> list[int]:
    """Slurm's tasks of each node: "2(x3),1" -> [2, 2, 2, 1]; nothing where it is not of this form."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))] if all(parts) else []


def _port(environ: Mapping[str, str], job: str | None) -> int:
    given = _number(environ, "MASTER_PORT")
    if given is not None:
        return given
    return _PORT if job is None else 10000 + zlib.crc32(job.encode()) % _PORTS


def _is_served(environ: Mapping[str, str]) -> bool:
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _optional(environ: Mapping[str, str], name: str) -> int | None:
    return int(environ[name]) if environ.get(name) else None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    try:
        return _optional(environ, name)
    except ValueError:
        raise UsageError(
            f"{name}={environ[name]!r} is not a whole number; unset it, or set what its launcher sets"
        ) from None


def _check(rank: int, size: int, rank_name: str, size_name: str, fix: str) -> None:
    if not 0 <= rank < size:
        raise UsageError(f"{rank_name}={rank} is none of {size_name}={size}'s ranks, 0 to {size - 1}; {fix}")
