"""Making communicators: choose the NICs all ranks share, connect over them."""

from __future__ import annotations

import itertools
import logging
import os
from typing import TYPE_CHECKING, Any, Literal

from holmes_comm import _C
from holmes_comm.clusters import agree_membership, bindings, engine_min_bytes
from holmes_comm.errors import UsageError
from holmes_comm.nics import NicSelection

if TYPE_CHECKING:
    from holmes_comm._C import Communicator

__all__ = ["init"]

_log = logging.getLogger(__name__)
_names = itertools.count()
_DEFAULT_TIMEOUT_S = 1800.0  # as torch.distributed
_DEFAULT_CONNECT_TIMEOUT_S = 60.0


def init(
    store: Any = None,
    rank: int | None = None,
    size: int | None = None,
    *,
    nics: NicSelection | None = None,
    transport: str | None = None,
    name: str | None = None,
    timeout_s: float = _DEFAULT_TIMEOUT_S,
    connect_timeout_s: float = _DEFAULT_CONNECT_TIMEOUT_S,
    secret: str = "",
    cluster: str | None = None,
    cluster_nics: NicSelection | None = None,
    hierarchical_min_bytes: int | Literal["never"] | None = None,
) -> Communicator:
    """Make a communicator. Collective over all ranks that share the store.

    Args:
        store: any object with ``set(key, bytes)``, ``get(key)`` and ``wait``: a :class:`TcpStore`, a
            :class:`LocalStore`, a torch.distributed store. None: a TcpStore at MASTER_ADDR:MASTER_PORT, which rank 0
            serves.
        rank: this process's rank; None: the environment's RANK.
        size: number of ranks; None: the environment's WORLD_SIZE.
        nics: which NICs to use; None: HOLMES_NICS, else the fastest NIC that all ranks share.
        transport: "auto" (shared memory between ranks of one host, else TCP), "tcp" or "shm"; None: what ``nics`` says.
        name: appears in errors; must be the same on all ranks and unique in the store. None: counted.
        timeout_s: deadline of an operation in seconds unless its call gives one.
        connect_timeout_s: deadline of the set-up in seconds.
        secret: per-job secret, the same on all ranks; empty: HOLMES_SECRET, else made by rank 0 and shared by the
            store.
        cluster: name of the cluster this rank is in; None: HOLMES_CLUSTER, else no cluster. Where the ranks name
            several, large collectives run hierarchically (docs/hierarchy.md), and ``nics`` joins the clusters.
        cluster_nics: which NICs to use between ranks of the cluster; None: HOLMES_CLUSTER_NICS, else the fastest NIC
            that they share.
        hierarchical_min_bytes: size in bytes from which on operations over several clusters run hierarchically, the
            same on all ranks; "never": none does; None: HOLMES_HIERARCHICAL_MIN_BYTES, else measured now (some tenths
            of a second).

    Raises:
        NicError: a rank has no NIC that fits; names rank, host and interface, on all ranks.
        UnreachableError: two ranks cannot be connected; names both, and the addresses tried.
        ProtocolError: a rank has another secret or version.
        TimeoutError: a rank did not come; names it.
    """
    rank = _from_environment("rank", "RANK", rank)
    size = _from_environment("size", "WORLD_SIZE", size)
    if name is None:
        name = f"comm{next(_names)}"
    if store is None:
        store = _environment_store(rank, connect_timeout_s)
    selection = nics if nics is not None else NicSelection.from_env(dict(os.environ))
    if transport is None:
        transport = selection.transport if selection is not None else "auto"
    membership = agree_membership(
        store,
        rank,
        size,
        selection,
        cluster,
        cluster_nics,
        timeout_s=connect_timeout_s,
        key_prefix=f"holmes/{name}/nics",
    )
    _log.info("communicator %s: %s", name, membership.reason)
    return _C.make_communicator(
        store,
        rank,
        size,
        f"holmes/{name}",
        bindings(membership.nics),
        transport,
        timeout_s,
        connect_timeout_s,
        secret,
        membership.clusters,
        bindings(membership.cluster_nics),
        engine_min_bytes(hierarchical_min_bytes),
    )


def _from_environment(argument: str, variable: str, value: int | None) -> int:
    if value is not None:
        return value
    text = os.environ.get(variable)
    if text is None:
        raise UsageError(f"{argument} is not given and {variable} is not set; pass {argument}= or start with torchrun")
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{variable}={text!r} is not a whole number") from None


def _environment_store(rank: int, timeout_s: float) -> Any:
    host = os.environ.get("MASTER_ADDR")
    port = _from_environment("the store's port", "MASTER_PORT", None)
    if host is None:
        raise UsageError("store is not given and MASTER_ADDR is not set; pass store= or start with torchrun")
    return _C.TcpStore(host, port, is_server=rank == 0, timeout_s=timeout_s)
