"""Making communicators: choose the NICs all ranks share, connect over them."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from holmes_comm import _C, process_end  # noqa: F401 - importing it is what it is for
from holmes_comm.clusters import GroupOptions, agree_membership, assign, bindings
from holmes_comm.errors import UsageError
from holmes_comm.launch import Launch, recognize
from holmes_comm.metrics_server import start_from_environment
from holmes_comm.nics import NicSelection

if TYPE_CHECKING:
    from holmes_comm._C import Communicator
    from holmes_comm.nccl_options import NcclSettings

__all__ = ["init"]

_names = itertools.count()


@dataclass
class _JobStore:
    lock: Any = field(default_factory=threading.Lock)
    store: Any = None


#: The store that a launcher's variables name, for as long as the process lives: rank 0 serves it, and the ranks make
#: and end their communicators at different times. By process (not of a fork), and host, port, secret and rank.
_job_stores: dict[tuple[int, tuple[str, int, str, int]], _JobStore] = {}


def init(
    store: Any = None,
    rank: int | None = None,
    size: int | None = None,
    *,
    nics: NicSelection | None = None,
    transport: str | None = None,
    name: str | None = None,
    timeout_s: float | None = None,
    connect_timeout_s: float | None = None,
    secret: str = "",
    cluster: str | None = None,
    cluster_nics: NicSelection | None = None,
    hierarchical_min_bytes: int | Literal["never"] | None = None,
    tls: Literal["off", "clusters", "all"] | None = None,
    priority: int | None = None,
    turn: int | None = None,
    dscp: int | None = None,
    backend: str = "host",
    device: int | None = None,
    nccl_variables: dict[str, str] | None = None,
    nccl_host_id: str = "",
    nccl: NcclSettings | None = None,
    options: _C.CommunicatorOptions | None = None,
) -> Communicator:
    """Make a communicator. Collective over all ranks that share the store.

    Args:
        store: any object with ``set(key, bytes)``, ``get(key)`` and ``wait``: a :class:`TcpStore`, a
            :class:`LocalStore`, a torch.distributed store. None: a TcpStore where the launcher says
            (MASTER_ADDR:MASTER_PORT), which rank 0 serves until its process ends; all communicators meet there.
        rank: this process's rank; None: the launcher's (torchrun, srun, mpirun, mpiexec; :mod:`holmes_comm.launch`).
        size: number of ranks; None: the launcher's.
        nics: which NICs to use; None: HOLMES_NICS, else the fastest NIC that all ranks share.
        transport: "auto" (shared memory between ranks of one host, else RDMA where all ranks share a fabric and nothing
            asks for what only TCP has, else TCP), "tcp", "shm" or "rdma" (shared memory between ranks of one host, else
            RDMA, or an error; docs/rdma.md); None: what ``nics`` says.
        name: appears in errors; must be the same on all ranks and unique in the store. None: counted. Where the set-up
            failed, all ranks may try again under it, in any order.
        timeout_s: deadline of an operation in seconds unless its call gives one; None: 1800, as torch.distributed.
        connect_timeout_s: deadline of the set-up in seconds; None: 60.
        secret: per-job secret, the same on all ranks; empty: HOLMES_SECRET, else made by rank 0 and shared by the
            store.
        cluster: name of the cluster this rank is in; None: HOLMES_CLUSTER, else no cluster. Where the ranks name
            several, large collectives run hierarchically (docs/hierarchy.md), and ``nics`` joins the clusters.
        cluster_nics: which NICs to use between ranks of the cluster; None: HOLMES_CLUSTER_NICS, else the fastest NIC
            that they share.
        hierarchical_min_bytes: size in bytes from which on operations over several clusters run hierarchically, the
            same on all ranks; "never": none does; None: HOLMES_HIERARCHICAL_MIN_BYTES, else measured now (some tenths
            of a second).
        tls: which TCP connections are encrypted, the same on all ranks: "off", "clusters" (those between ranks of
            different clusters), "all"; None: HOLMES_TLS, else off (docs/security.md).
        priority: 0 to 3, the same on all ranks: on links that they share, communicators of higher priority go first
            (docs/wan.md); None: as TCP shares.
        turn: 0 to 15, beside `priority`, the same on all ranks: of communicators of one priority that have one the
            lowest goes first; None: they share.
        dscp: code point of differentiated services that its IP packets have, 0 to 63, the same on all ranks; None: what
            its priority has (34, 18, 10, 1 for 3, 2, 1, 0), without one the system's.
        backend: "host" (host memory) or "nccl" (a GPU's memory, by NCCL over the NICs chosen here; docs/nccl.md); what
            is for the other one only is refused.
        device: with "nccl", the number of this rank's GPU; None: torch's current one, else 0.
        nccl_variables: with "nccl", NCCL variables for this communicator's NCCL alone ({"NCCL_IB_TC": "106"}).
        nccl_host_id: with "nccl", makes NCCL take this rank for one of another host (several ranks on one GPU).
        nccl: with "nccl", what NCCL is told for this communicator (thread blocks, priority, ...).
        options: what else the engine can be told, and what the arguments above say where they are left out. Not NICs
            and clusters, which are chosen here, nor ``rank``, ``size`` and ``name``.

    Raises:
        UsageError: an argument cannot be what it is, or the ranks' differ; on all ranks.
        NicError: a rank has no NIC that fits; names rank, host and interface, on all ranks.
        UnreachableError: two ranks cannot be connected; names both, and the addresses tried.
        ProtocolError: a rank has another secret or version.
        TimeoutError: a rank did not come; names it.
    """
    start_from_environment()
    if backend not in ("host", "nccl"):
        raise UsageError(f"backend {backend!r} does not exist; use 'host' or 'nccl'")
    asked = GroupOptions(
        nics=nics,
        cluster=cluster,
        cluster_nics=cluster_nics,
        hierarchical_min_bytes=hierarchical_min_bytes,
        tls=tls,
        priority=priority,
        turn=turn,
        dscp=dscp,
        nccl_variables=nccl_variables,
        nccl=nccl,
        options=options,
    )
    made_of = asked.engine_options()
    assign(made_of, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, secret=secret or None)
    launch = recognize() if rank is None or size is None or store is None else None
    rank = _place("rank", rank, launch)
    size = _place("size", size, launch)
    if name is None:
        name = f"comm{next(_names)}"
    if not isinstance(name, str) or not name:
        raise UsageError(f"name={name!r} names nothing in errors; give text of one character or more, or None")
    selection = nics if nics is not None else NicSelection.from_env(dict(os.environ))
    if store is None:
        store = _job_store(launch, rank, made_of.connect_timeout_s, made_of.secret)
    assign(made_of, rank=rank, size=size, name=f"holmes/{name}", transport=transport)
    if backend == "nccl":
        _refuse_what_nccl_has_not(asked, made_of)
    else:
        _refuse_nccls(device=device, nccl_variables=nccl_variables, nccl_host_id=nccl_host_id or None, nccl=nccl)
    store = _C.AttemptStore(store, made_of.name, rank, made_of.connect_timeout_s)
    if backend == "nccl":
        return _init_nccl(store, made_of, selection, device, nccl_variables, nccl_host_id, nccl)
    if transport is None and made_of.transport == "auto":
        made_of.transport = selection.transport
    membership = agree_membership(
        store,
        made_of,
        selection,
        cluster,
        cluster_nics,
        key_prefix=f"{made_of.name}/nics",
    )
    membership.settle(made_of)
    _C.log_nics(made_of, membership.reason)
    return _C.make_communicator(store, made_of)


#: Options of what moves host memory.
_OF_HOST_MEMORY = (
    *("transport", "hierarchical_min_bytes", "priority", "turn", "dscp"),
    *("integrity", "integrity_digest_every", "local_completion"),
)


def _refuse_nccls(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UsageError(f"{name}={value!r} is for backend='nccl'; give that, or leave it out")


def _refuse_what_nccl_has_not(asked: GroupOptions, made_of: _C.CommunicatorOptions) -> None:
    if asked.cluster is not None or asked.cluster_nics is not None or made_of.hierarchical_min_bytes is not None:
        raise UsageError("backend='nccl' has no clusters; make one communicator for each cluster")
    default = _C.CommunicatorOptions()
    for name in _OF_HOST_MEMORY:
        if (value := getattr(made_of, name)) != getattr(default, name):
            raise UsageError(f"{name}={value!r} is for host memory, not for backend='nccl'; leave it out")


def _init_nccl(
    store: Any,
    options: _C.CommunicatorOptions,
    selection: NicSelection | None,
    device: int | None,
    variables: dict[str, str] | None,
    host_id: str,
    settings: NcclSettings | None,
) -> _C.NcclCommunicator:
    from holmes_comm.nccl_agreement import agree_nccl, nccl_package_paths
    from holmes_comm.nccl_options import net_of

    agreement = agree_nccl(
        store,
        options.rank,
        options.size,
        selection,
        timeout_s=options.connect_timeout_s,
        key_prefix=f"{options.name}/nics",
        variables=variables,
        host_id=host_id,
        secret=options.secret,
        net=net_of(settings),
    )
    if device is None:
        torch = sys.modules.get("torch")
        device = torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0
    options.nics = bindings(agreement.nics)
    _C.log_nics(options, agreement.reason)
    given = settings.given() if settings is not None else {}
    packages = nccl_package_paths()
    return _C.make_nccl_communicator(store, options, agreement.profile, device, packages, settings=given)


def _place(argument: str, given: int | None, launch: Launch | None) -> int:
    if given is not None:
        return given
    if launch is None:
        raise UsageError(
            f"{argument} is not given and no launcher has set it (RANK and WORLD_SIZE, or srun's, mpirun's); pass "
            f"{argument}= or start with torchrun"
        )
    return launch.rank if argument == "rank" else launch.size


def _job_store(launch: Launch | None, rank: int, timeout_s: float, secret: str) -> Any:
    if launch is None:
        raise UsageError("store is not given and no launcher says where one is; pass store= or start with torchrun")
    place = (*launch.store_address(), secret, rank)
    job = _job_stores.setdefault((os.getpid(), place), _JobStore())
    with job.lock:
        if not _is_alive(job.store):
            forks = sum(other == place for _, other in list(_job_stores)) - 1
            job.store = _open_job_store(launch, rank, timeout_s, secret, forks)
        return job.store


def _is_alive(store: Any) -> bool:
    if store is None:
        return False
    try:
        store.set("holmes/alive", b"yes")
    except Exception:  # whatever this store says: a new one is tried, and tells why it cannot be made
        return False
    return True


def _open_job_store(launch: Launch, rank: int, timeout_s: float, secret: str, forks: int) -> Any:
    """`forks`: processes this one was forked from that have it open: the first serves, each generation has its keys."""
    store = launch.open_store(timeout_s, secret, may_serve=rank == 0 and forks == 0)
    return _C.PrefixStore(f"fork{forks}", store) if forks else store
