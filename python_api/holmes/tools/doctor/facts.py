"""Facts: what every rank reports, as plain data that travels as JSON; the checks see nothing else."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from holmes.cluster.topology import NodeInventory, Port, Topology, merge_hosts
from holmes.cluster.topology.topology import make_topology

if TYPE_CHECKING:
    from holmes.planning.plan.plan import Plan


@dataclass(frozen=True)
class NicFacts:
    """A NIC as `holmes_comm` discovers it, and the system's settings of its interface; None where unknown.

    `has_interface`: an RDMA port may have none. `address` is the one that is used ("10.0.0.1/16", empty: none), `gids`
    its GID table (dicts of index, gid, type). `rdma_mtu`: bytes of a packet that its HCA sends, as verbs tell it.
    `rp_filter`, `arp_filter`, `arp_ignore`: as the kernel combines "all" with the interface's own. `egress`: by which
    interface the kernel sends from this address into this subnet.
    """

    name: str
    nic_class: str
    kind: str = "physical"
    is_up: bool = True
    is_netdev_up: bool = True
    address: str = ""
    mtu: int | None = None
    speed_gbps: float | None = None
    has_gateway: bool = False
    hca: str = ""
    state: str = "up"
    has_interface: bool = True
    master: str = ""
    parent: str = ""
    gids: Sequence[Mapping[str, Any]] = ()
    gid_index: int | None = None
    rdma_mtu: int | None = None
    rp_filter: int | None = None
    arp_filter: int | None = None
    arp_ignore: int | None = None
    egress: str | None = None

    @property
    def ip(self) -> str:
        """The address without its prefix."""
        return self.address.partition("/")[0]

    @property
    def subnet(self) -> str:
        """ "10.0.0.0/16"; empty without an address."""
        return str(ipaddress.ip_interface(self.address).network) if self.address else ""

    @property
    def is_wire(self) -> bool:
        """Whether it is a way to other hosts: up, addressed, and no bridge or virtual interface of this host."""
        virtual = self.nic_class == "loopback" or self.kind in ("bridge", "virtual", "loopback")
        return self.is_netdev_up and bool(self.address) and not virtual


@dataclass(frozen=True)
class RankFacts:
    """What one rank reports of its host and of its own process; None: unlimited for limits, unknown for the rest.

    `variables`: those that steer communication; secrets are left out. `hostname_addresses`: what the host's name
    resolves to. `selection_error`: why HOLMES_NICS fits no NIC here. `variables_error`: with which variable no
    communicator can be made, and why. `emulated`: on a node of `holmes testbed`, whose RDMA NICs carry TCP only. Sizes
    in bytes.
    """

    rank: int
    host: str
    host_id: str
    nics: Sequence[NicFacts] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    hostname_addresses: Sequence[str] = ()
    memlock_limit_bytes: int | None = None
    open_files_limit: int | None = None
    open_files: int = 0
    shm_free_bytes: int | None = None
    memfd_error: str = ""
    tcp_read_max_bytes: int | None = None
    tcp_write_max_bytes: int | None = None
    congestion_control: str | None = None
    nccl_version: str | None = None
    holmes_version: str | None = None
    torch_version: str | None = None
    selection_error: str = ""
    variables_error: str = ""
    emulated: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankFacts:
        """The inverse of `to_dict`."""
        nics = (NicFacts(**{**nic, "gids": tuple(nic["gids"])}) for nic in data["nics"])
        return cls(**{**data, "nics": tuple(nics)})


@dataclass(frozen=True)
class HostFacts:
    """A host: its name (unique in the job), its ranks, and what its lowest rank reported."""

    name: str
    ranks: tuple[int, ...]
    facts: RankFacts

    @property
    def wires(self) -> list[NicFacts]:
        """Its usable NICs, without the members of bonds and bridges."""
        return [nic for nic in self.facts.nics if nic.is_wire and not nic.master]


@dataclass(frozen=True)
class Trial:
    """One connection attempt between two hosts, from NIC to NIC.

    `outcome`: "ok", "refused" (the other host's kernel or a firewall answered no), "silent" (no answer in time),
    "unroutable" (the system knows no way), "other host" (somebody else answered). `has_arp`: whether the target's
    hardware address became known, which it does only on a working wire; None: unknown. `round_trip_s`: the quickest.
    """

    source: str
    source_nic: str
    target: str
    target_nic: str
    subnet: str
    address: str
    port: int
    outcome: str
    has_arp: bool | None = None
    round_trip_s: float | None = None


@dataclass(frozen=True)
class Clock:
    """A host's clock minus rank 0's host's, in seconds, known to +- `error_s`."""

    host: str
    offset_s: float
    error_s: float


@dataclass(frozen=True)
class JobFacts:
    """All that the checks see. `ranks` are in order of rank, `hosts` in order of their lowest rank.

    `plan`: the one that the job will run, where one was given.
    """

    ranks: Sequence[RankFacts]
    hosts: Sequence[HostFacts]
    topology: Topology = field(default_factory=lambda: make_topology((), ()))
    trials: Sequence[Trial] = ()
    clocks: Sequence[Clock] = ()
    plan: Plan | None = None

    @cached_property
    def by_rank(self) -> dict[int, HostFacts]:
        """Each rank's host."""
        return {rank: host for host in self.hosts for rank in host.ranks}

    @cached_property
    def hosts_by_name(self) -> dict[str, HostFacts]:
        """Each host by its name."""
        return {host.name: host for host in self.hosts}

    def host_of(self, rank: int) -> str:
        """The name of a rank's host."""
        return self.by_rank[rank].name


def gather_hosts(ranks: Sequence[RankFacts]) -> list[HostFacts]:
    """The hosts of these ranks, named as in a topology of them."""
    by_rank = {facts.rank: facts for facts in ranks}
    merged = merge_hosts([NodeInventory(facts.rank, facts.host, facts.host_id, ()) for facts in ranks])
    return [HostFacts(host.name, host.ranks, by_rank[host.ranks[0]]) for host in merged]


def ports_of(facts: RankFacts) -> tuple[Port, ...]:
    """The usable NICs as a topology has them."""
    return tuple(
        Port(nic.name, nic.nic_class, nic.ip, nic.subnet, nic.speed_gbps, nic.has_gateway, nic.parent)
        for nic in facts.nics
        if nic.is_netdev_up and nic.address and nic.nic_class != "loopback"
    )
