"""Groups that span clusters: who is where, on which NICs."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from holmes_comm._C import CommunicatorOptions, rdma_objection
from holmes_comm.errors import UsageError
from holmes_comm.nccl_options import NcclSettings
from holmes_comm.nic_agreement import Carrier, agree_group
from holmes_comm.nic_selection import text_of
from holmes_comm.nics import Nic, NicSelection

__all__ = ["GroupOptions", "Membership", "agree_membership", "assign"]

#: What moves the bytes between hosts, by transport.
_CARRIERS: dict[str, Carrier] = {"auto": "auto", "tcp": "tcp", "shm": "tcp", "rdma": "rdma"}
#: Fields of CommunicatorOptions that are chosen for a group, and which argument says what they are chosen from.
_CHOSEN = {
    "nics": "nics",
    "rdma_ports": "nics",
    "clusters": "cluster",
    "cluster_names": "cluster",
    "cluster_nics": "cluster_nics",
}


@dataclass(frozen=True)
class GroupOptions:
    """`pg_options` of a torch.distributed group: a NIC selection and, where it spans clusters, this rank's cluster.

    nics: which NICs to use; None: HOLMES_NICS. cluster: name of the cluster this rank is in; None: HOLMES_CLUSTER.
    cluster_nics: which NICs to use between ranks of the cluster; None: HOLMES_CLUSTER_NICS. hierarchical_min_bytes:
    size in bytes from which on collectives run hierarchically, "never": none does (for groups that only send, receive
    and reduce little); None: HOLMES_HIERARCHICAL_MIN_BYTES, else measured. tls: "off", "clusters" or "all", which
    connections are encrypted; None: HOLMES_TLS, else off. priority: 0 to 3, the same on all ranks: on links that they
    share, groups of higher priority go first (docs/wan.md); None: as TCP shares. turn: 0 to 15, beside `priority`, the
    same on all ranks: of groups of one priority that have one the lowest goes first; None: they share. dscp: code point
    of its IP packets, 0 to 63, the same on all ranks; None: what its priority has (34, 18, 10, 1 for 3, 2, 1, 0),
    without one the system's. nccl_variables: NCCL variables for the group's CUDA tensors alone ({"NCCL_IB_TC": "106"}).
    nccl: what NCCL is told for the group. options: what else the engine can be told, and what the others say where they
    are left out; not NICs and clusters, which are chosen, nor `rank`, `size` and `name`. Deadlines of operations are
    torch's `timeout`. As the arguments of `holmes_comm.init`; each rank of the group passes its own. Immutable. Raises
    UsageError where a
    field has a value it cannot have.
    """

    nics: NicSelection | None = None
    cluster: str | None = None
    cluster_nics: NicSelection | None = None
    hierarchical_min_bytes: int | Literal["never"] | None = None
    tls: Literal["off", "clusters", "all"] | None = None
    priority: int | None = None
    turn: int | None = None
    dscp: int | None = None
    nccl_variables: dict[str, str] | None = None
    nccl: NcclSettings | None = None
    options: CommunicatorOptions | None = None

    def __post_init__(self) -> None:
        for name in ("nics", "cluster_nics"):
            _check_type(self, name, NicSelection, "no NicSelection; say for example NicSelection.parse('eth1,eth2')")
        _check_type(self, "cluster", str, "no name of a cluster; give text")
        _check_type(self, "nccl_variables", dict, "no dict of NCCL variables")
        _check_type(self, "nccl", NcclSettings, "no NcclSettings")
        _check_type(self, "options", CommunicatorOptions, "no CommunicatorOptions")
        self.engine_options()

    def engine_options(self) -> CommunicatorOptions:
        """What the engine is told: `options`, and over them what the other fields say. A copy. Local."""
        options = CommunicatorOptions() if self.options is None else copy.copy(self.options)
        for name, argument in _CHOSEN.items():
            if value := getattr(options, name):
                raise UsageError(f"options.{name}={value!r} says nothing here, where it is chosen; give {argument}=")
        for name in ("hierarchical_min_bytes", "tls", "priority", "turn", "dscp"):
            assign(options, **{name: getattr(self, name)})
        if self.nics is not None and options.transport == "auto":
            options.transport = self.nics.transport
        options.check()
        return options


def _check_type(options: GroupOptions, name: str, wanted: type, why: str) -> None:
    value = getattr(options, name)
    if value is not None and not isinstance(value, wanted):
        raise UsageError(f"{name}={value!r} is {why}")


def assign(options: CommunicatorOptions, **values: Any) -> None:
    """Sets the fields that are given; where one is of a wrong type UsageError names it, without a secret's value."""
    for name, value in values.items():
        if value is None:
            continue
        try:
            setattr(options, name, value)
        except TypeError:
            kinds = {int: "a whole number", float: "a number", str: "text"}
            kind = "text" if name == "tls" else kinds.get(type(getattr(options, name)), "a whole number or None")
            shown = type(value).__name__ if name == "secret" else repr(value)
            if isinstance(value, int) and kind.startswith("a whole number"):
                raise UsageError(f"{name}={shown} is beyond what its type can hold; give {kind}") from None
            raise UsageError(f"{name}={shown} is of another type than it can be; give {kind}") from None


class Membership(NamedTuple):
    """A rank's place in a group.

    nics: this rank's NICs in the networks that all ranks share. clusters: number of each rank's cluster, by rank; empty
    where there is only one. cluster_names: their names, as clusters. cluster_nics: this rank's NICs in the networks
    that its cluster shares; empty without clusters. reason: why these, in words. ports: this rank's HCA ports, of
    its cluster where there are several; empty: no RDMA.
    """

    nics: list[Nic]
    ports: list[Nic]
    clusters: list[int]
    cluster_names: list[str]
    cluster_nics: list[Nic]
    reason: str

    def settle(self, options: CommunicatorOptions) -> None:
        """Writes it into `options`, in place."""
        options.nics, options.clusters, options.cluster_names = bindings(self.nics), self.clusters, self.cluster_names
        options.rdma_ports = [port.port_name for port in self.ports]
        options.cluster_nics = bindings(self.cluster_nics)


def agree_membership(
    store: Any,
    options: CommunicatorOptions,
    nics: NicSelection | None,
    cluster: str | None,
    cluster_nics: NicSelection | None,
    *,
    key_prefix: str,
) -> Membership:
    """Agrees on NICs and clusters. Collective over the ranks of `store`.

    options: of this rank; what they ask for of TCP alone keeps it from RDMA where the transport is "auto". nics: what
    to choose from for the whole group; None: HOLMES_NICS. cluster: name of this rank's cluster; None: HOLMES_CLUSTER,
    else none. cluster_nics: what to choose from inside the cluster; None: HOLMES_CLUSTER_NICS, else the fastest NIC
    that the ranks of the cluster share. key_prefix: keys used in the store; a fresh one for every call. Raises as
    agree_group does, and UsageError where the connections between clusters are to be encrypted and nobody
    says which these are.
    """
    cluster = text_of("HOLMES_CLUSTER") if cluster is None else cluster
    shared = agree_group(
        store,
        options.rank,
        options.size,
        nics,
        timeout_s=options.connect_timeout_s,
        key_prefix=key_prefix,
        cluster=cluster,
        carrier=_CARRIERS[options.transport],
        no_rdma=rdma_objection(options),
        secret=options.secret,
    )
    names = list(dict.fromkeys(shared.clusters))
    if names == [""] and options.size > 1 and (options.tls or os.environ.get("HOLMES_TLS")) == "clusters":
        raise UsageError(
            "tls='clusters' encrypts what travels between clusters, but no rank of this group names its cluster; set "
            "HOLMES_CLUSTER on every rank (or pass cluster=), or use tls='all'"
        )
    if len(names) < 2:
        return Membership(shared.nics, shared.ports, [], [], [], shared.reason)
    if cluster_nics is None:
        cluster_nics = NicSelection.parse(text_of("HOLMES_CLUSTER_NICS"))
    members = [other for other, name in enumerate(shared.clusters) if name == cluster]
    inside = agree_group(
        store,
        members.index(options.rank),
        len(members),
        cluster_nics,
        timeout_s=options.connect_timeout_s,
        key_prefix=f"{key_prefix}/cluster{names.index(cluster)}",
        carrier=_CARRIERS[options.transport] if cluster_nics.transport != "tcp" and len(members) > 1 else "tcp",
        no_rdma=rdma_objection(options),
        secret=options.secret,
    )
    return Membership(
        shared.nics,
        inside.ports,
        [names.index(name) for name in shared.clusters],
        shared.clusters,
        inside.nics,
        f"spans the clusters {', '.join(names)}; between them {shared.reason}; inside {cluster} {inside.reason}",
    )


def bindings(nics: list[Nic]) -> list[tuple[str, str]]:
    """(interface, address) pairs, as the engine takes them."""
    return [(nic.netdev, nic.address or "") for nic in nics]
