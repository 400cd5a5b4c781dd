"""From inventories to hosts, and from hosts to the fabrics that their NICs suggest."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from holmes.cluster.topology.parts import Fabric, Host, NodeInventory, Port
from holmes.cluster.topology.preference import ROUTED, best_first, is_verbs_only
from holmes_comm.errors import UsageError


def merge_hosts(inventories: Sequence[NodeInventory]) -> tuple[Host, ...]:
    """Hosts in the order of their lowest rank; the lowest rank's view of the NICs counts. Names become unique.

    Raises ValueError where the ranks are not exactly 0 to N-1.
    """
    ranks = sorted(inventory.rank for inventory in inventories)
    if ranks != list(range(len(inventories))):
        raise UsageError(f"inventories must be of ranks 0 to {len(inventories) - 1}, once each; got {ranks}")
    by_host: dict[str, list[NodeInventory]] = {}
    for inventory in sorted(inventories, key=lambda item: item.rank):
        by_host.setdefault(inventory.host_id, []).append(inventory)
    names = Counter(members[0].host for members in by_host.values())
    return tuple(
        Host(
            name=members[0].host if names[members[0].host] == 1 else f"{members[0].host}#{i}",
            host_id=host_id,
            ranks=tuple(inventory.rank for inventory in members),
            ports=members[0].ports,
        )
        for i, (host_id, members) in enumerate(by_host.items())
    )


def candidate_fabrics(hosts: Sequence[Host]) -> tuple[Fabric, ...]:
    """Assumed fabrics, best first; each joins at least two hosts, of which the fastest NIC in it counts.

    NICs of one class in one subnet (of ports without IP address: with one GID prefix); where RoCE and plain Ethernet
    NICs share a subnet, also all of them as Ethernet; and where Ethernet NICs with a gateway lie in several subnets,
    all of those, as one routed fabric.
    """
    members: dict[tuple[str, str], dict[str, Port]] = {}
    for host in hosts:
        for port in sorted(host.ports, key=lambda item: (item.is_rdma, -(item.speed_gbps or 0.0), item.name)):
            keys = [(port.nic_class, port.subnet)]
            if port.nic_class != "infiniband" and not is_verbs_only(port.subnet):
                keys.append(("ethernet", port.subnet))
                if port.has_gateway:
                    keys.append(("ethernet", ROUTED))
            for key in keys:
                members.setdefault(key, {}).setdefault(host.host_id, port)
    fabrics = []
    for (nic_class, subnet), ports in members.items():
        only_roce = nic_class == "ethernet" and len({port.nic_class for port in ports.values() if port.is_rdma}) == 1
        only_roce = only_roce and all(port.is_rdma for port in ports.values())
        one_subnet = subnet == ROUTED and len({port.subnet for port in ports.values()}) == 1
        if len(ports) > 1 and not only_roce and not one_subnet:
            fabrics.append(make_fabric(f"{nic_class} {subnet}", nic_class, subnet, ports, confirmed=False))
    return in_order(hosts, fabrics)


def in_order(hosts: Iterable[Host], fabrics: Iterable[Fabric]) -> tuple[Fabric, ...]:
    """The fabrics of these hosts, best first (docs/nics.md)."""
    by_name = sorted(fabrics, key=lambda fabric: fabric.name)
    children = child_fabrics(hosts, by_name)
    ordered = best_first(by_name, lambda fabric: fabric.ports, lambda fabric: fabric.name in children, same_hosts=True)
    return tuple(rails[0] for rails in ordered)


def child_fabrics(hosts: Iterable[Host], fabrics: Iterable[Fabric]) -> set[str]:
    """The names of the fabrics in which some host is through a NIC that shares another one's wire."""
    children = {host.host_id: names for host in hosts if (names := {port.name for port in host.ports if port.parent})}
    return {
        fabric.name
        for fabric in fabrics
        if any(fabric.ports.get(host_id) in names for host_id, names in children.items())
    }


def make_fabric(name: str, nic_class: str, subnet: str, ports: Mapping[str, Port], *, confirmed: bool) -> Fabric:
    """A fabric of these ports, by host id, in the order of their addresses: neighbours often share a switch.

    Its line rate is the slowest one's that is known.
    """
    speeds = [port.speed_gbps for port in ports.values() if port.speed_gbps]
    nics = {host_id: port.name for host_id, port in sorted(ports.items(), key=lambda item: _place(item[1].address))}
    return Fabric(name, nic_class, subnet, min(speeds) if speeds else None, nics, confirmed)


def rails_together(fabrics: Iterable[Fabric]) -> list[list[Fabric]]:
    """Fabrics of one class and rate that join the same hosts, together: the rails of one network, for showing."""
    groups: dict[frozenset[str], list[list[Fabric]]] = {}
    for fabric in fabrics:
        same_hosts = groups.setdefault(frozenset(fabric.ports), [])
        group = next((group for group in same_hosts if group[0].is_like(fabric)), None)
        if group is None:
            same_hosts.append([fabric])
        else:
            group.append(fabric)
    return [group for same_hosts in groups.values() for group in same_hosts]


def _place(address: str) -> tuple[int, int]:
    """Where an address is among others; addresses that are none, as a hand-written file may have, stay as they are."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return (0, 0)
    return (parsed.version, int(parsed))


def components(members: Sequence[str], edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The connected parts of a graph, each in the order of `members`, by their first member."""
    parent = {member: member for member in members}

    def root(member: str) -> str:
        while parent[member] != member:
            parent[member] = member = parent[parent[member]]
        return member

    for one, other in edges:
        parent[root(one)] = root(other)
    found: dict[str, list[str]] = {}
    for member in members:
        found.setdefault(root(member), []).append(member)
    return list(found.values())
