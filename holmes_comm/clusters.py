"""Groups that span clusters: who is where, on which NICs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from holmes_comm.errors import UsageError
from holmes_comm.nic_agreement import agree_group
from holmes_comm.nics import Nic, NicSelection

if TYPE_CHECKING:
    from holmes_comm._C import CommunicatorOptions
    from holmes_comm.nccl_options import NcclSettings

__all__ = ["GroupOptions", "Membership", "agree_membership"]


@dataclass(frozen=True)
class GroupOptions:
    """`pg_options` of a torch.distributed group: a NIC selection and, where it spans clusters, this rank's cluster.

    nics: which NICs to use; None: HOLMES_NICS. cluster: name of the cluster this rank is in; None: HOLMES_CLUSTER.
    cluster_nics: which NICs to use between ranks of the cluster; None: HOLMES_CLUSTER_NICS. hierarchical_min_bytes:
    size in bytes from which on collectives run hierarchically, "never": none does (for groups that only send, receive
    and reduce little); None: HOLMES_HIERARCHICAL_MIN_BYTES, else measured. tls: "off", "clusters" or "all", which
    connections are encrypted; None: HOLMES_TLS, else off. priority: 0 to 3, the same on all ranks: on links that they
    share, groups of higher priority go first (docs/wan.md); None: as TCP shares. dscp: code point of its IP packets, 0
    to 63, the same on all ranks; None: what its priority has (34, 18, 10, 1 for 3, 2, 1, 0), without one the system's.
    nccl_variables: NCCL variables for the group's CUDA tensors alone ({"NCCL_IB_TC": "106"}). nccl: what NCCL is told
    for the group. options: what else the engine can be told.
    As the arguments of `holmes_comm.init`; each rank of the group passes its own. Immutable.
    """

    nics: NicSelection | None = None
    cluster: str | None = None
    cluster_nics: NicSelection | None = None
    hierarchical_min_bytes: int | Literal["never"] | None = None
    tls: Literal["off", "clusters", "all"] | None = None
    priority: int | None = None
    dscp: int | None = None
    nccl_variables: dict[str, str] | None = None
    nccl: NcclSettings | None = None
    options: CommunicatorOptions | None = None


class Membership(NamedTuple):
    """A rank's place in a group.

    nics: this rank's NICs in the networks that all ranks share. clusters: number of each rank's cluster, by rank; empty
    where there is only one. cluster_nics: this rank's NICs in the networks that its cluster shares; empty without
    clusters. reason: why these, in words. ports: this rank's HCA port where transport "rdma" was asked for.
    """

    nics: list[Nic]
    ports: list[Nic]
    clusters: list[int]
    cluster_nics: list[Nic]
    reason: str


def agree_membership(
    store: Any,
    rank: int,
    size: int,
    nics: NicSelection | None,
    cluster: str | None,
    cluster_nics: NicSelection | None,
    *,
    timeout_s: float,
    key_prefix: str,
    transport: str = "auto",
    tls: str | None = None,
    secret: str = "",
) -> Membership:
    """Agrees on NICs and clusters. Collective over the `size` ranks of `store`.

    nics: what to choose from for the whole group; None: HOLMES_NICS. cluster: name of this rank's cluster; None:
    HOLMES_CLUSTER, else none. cluster_nics: what to choose from inside the cluster; None: HOLMES_CLUSTER_NICS, else the
    fastest NIC that the ranks of the cluster share. timeout_s: seconds to wait for the other ranks. key_prefix: keys
    used in the store; a fresh one for every call. tls: as of `GroupOptions`. secret: the job's. Raises
    as agree_group does, and UsageError where the connections between clusters are to be encrypted and nobody says which
    these are. transport: "rdma" asks for an HCA port that all ranks share.
    """
    cluster = os.environ.get("HOLMES_CLUSTER", "") if cluster is None else cluster
    shared = agree_group(
        store,
        rank,
        size,
        nics,
        timeout_s=timeout_s,
        key_prefix=key_prefix,
        cluster=cluster,
        carrier="rdma" if transport == "rdma" else "tcp",
        secret=secret,
    )
    names = list(dict.fromkeys(shared.clusters))
    if names == [""] and size > 1 and (tls or os.environ.get("HOLMES_TLS")) == "clusters":
        raise UsageError(
            "tls='clusters' encrypts what travels between clusters, but no rank of this group names its cluster; set "
            "HOLMES_CLUSTER on every rank (or pass cluster=), or use tls='all'"
        )
    if len(names) < 2:
        return Membership(shared.nics, shared.ports, [], [], shared.reason)
    if cluster_nics is None:
        cluster_nics = NicSelection.parse(os.environ.get("HOLMES_CLUSTER_NICS", ""))
    members = [other for other, name in enumerate(shared.clusters) if name == cluster]
    inside = agree_group(
        store,
        members.index(rank),
        len(members),
        cluster_nics,
        timeout_s=timeout_s,
        key_prefix=f"{key_prefix}/cluster{names.index(cluster)}",
        secret=secret,
    )
    return Membership(
        shared.nics,
        shared.ports,
        [names.index(name) for name in shared.clusters],
        inside.nics,
        f"spans the clusters {', '.join(names)}; between them {shared.reason}; inside {cluster} {inside.reason}",
    )


def bindings(nics: list[Nic]) -> list[tuple[str, str]]:
    """(interface, address) pairs, as the engine takes them."""
    return [(nic.netdev, nic.address or "") for nic in nics]
