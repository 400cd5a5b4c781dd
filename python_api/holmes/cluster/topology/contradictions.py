"""What the hosts' NICs say of themselves against what the connections show: wrong classes, hosts out of reach."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from holmes.cluster.topology.parts import RDMA_CLASSES, Fabric, Host, Port, TopologyFinding
from holmes.cluster.topology.preference import ROUTED, is_verbs_only
from holmes.words import some

MIXED = "mixed"  # in place of a NIC class: a subnet in which NICs say InfiniBand and others say Ethernet
_UNEQUAL_SPEED = 0.5


def mixed_wires(hosts: Sequence[Host]) -> tuple[Fabric, ...]:
    """The subnets in which some NICs say InfiniBand and others RoCE or Ethernet; to be tried like other fabrics.

    One wire cannot be both: where the NICs of such a subnet reach each other, one of them says something wrong.
    """
    members: dict[str, dict[str, Port]] = {}
    for host in hosts:
        for port in sorted(host.ports, key=lambda port: not port.is_rdma):
            members.setdefault(port.subnet, {}).setdefault(host.host_id, port)
    found = []
    for subnet, ports in members.items():
        classes = {port.nic_class for port in ports.values()}
        if "infiniband" in classes and len(classes) > 1:
            names = {host_id: port.name for host_id, port in ports.items()}
            found.append(Fabric(f"{MIXED} {subnet}", MIXED, subnet, None, names))
    return tuple(found)


def contradictions(
    hosts: Sequence[Host], assumed: Sequence[Fabric], confirmed: Sequence[Fabric], wires: Sequence[Fabric]
) -> list[TopologyFinding]:
    """What is wrong, one finding for a NIC: `assumed` and `confirmed` fabrics, and the `wires` (mixed) that connect."""
    by_id = {host.host_id: host for host in hosts}
    found = [finding for wire in wires for finding in _classes(wire, by_id)]
    found += [finding for fabric in confirmed if fabric.nic_class == "ethernet" for finding in _roce(fabric, by_id)]
    found += [finding for fabric in assumed for finding in _out_of_reach(fabric, confirmed, by_id)]
    found += [finding for fabric in confirmed for finding in _line_rates(fabric, by_id)]
    found += _alone(hosts, assumed)
    first: dict[tuple[str, str], TopologyFinding] = {}
    for finding in found:
        first.setdefault((finding.host, finding.nic), finding)
    return list(first.values())


def _classes(wire: Fabric, hosts: Mapping[str, Host]) -> list[TopologyFinding]:
    ports = _ports(wire, hosts)
    most, others = _majority(port.nic_class for port in ports.values())
    found = []
    for host_id, port in ports.items():
        if port.nic_class == most or not others:
            continue
        differ = [f"{hosts[i].name} {p.name}" for i, p in ports.items() if p.nic_class != port.nic_class]
        found.append(
            TopologyFinding(
                "class",
                hosts[host_id].name,
                port.name,
                f"says {port.nic_class}, but reaches over {wire.subnet} {some(differ)}, which say "
                f"{most or 'otherwise'}" + ("" if most else "; one side is wrong, it cannot be told which"),
                "compare link layers (`holmes nics` or ibstat on both), then correct cable, driver or address",
            )
        )
    return found


def _roce(fabric: Fabric, hosts: Mapping[str, Host]) -> list[TopologyFinding]:
    """In an Ethernet that is mostly RoCE: hosts without RDMA on as fast a NIC, or with another RoCE version."""
    ports = {host_id: port for host_id, port in _ports(fabric, hosts).items() if fabric.subnet != ROUTED}
    most, others = _majority(port.nic_class for port in ports.values())
    if most not in RDMA_CLASSES or not others:
        return []
    speeds = {port.speed_gbps for port in ports.values() if port.nic_class == most}
    found = []
    for host_id, port in ports.items():
        if port.is_rdma and port.nic_class != most:
            fix = f"let its GID table have {most} entries (address, rdma_roce_type), or set the others to its version"
        elif not port.is_rdma and port.speed_gbps in speeds:
            fix = "load its RDMA driver (`rdma link` must show it), or keep it out of this subnet"
        else:
            continue
        count = sum(other.nic_class == most for other in ports.values())
        problem = f"says {port.nic_class}, but the {count} other NICs like it in {fabric.subnet} say {most}"
        found.append(TopologyFinding("class", hosts[host_id].name, port.name, problem, fix))
    return found


def _out_of_reach(assumed: Fabric, confirmed: Sequence[Fabric], hosts: Mapping[str, Host]) -> list[TopologyFinding]:
    if assumed.subnet == ROUTED:
        return []
    same = [f for f in confirmed if (f.nic_class, f.subnet) == (assumed.nic_class, assumed.subnet)]
    joined = dict.fromkeys(host_id for fabric in same for host_id in fabric.ports)
    if not joined and (assumed.nic_class not in RDMA_CLASSES or is_verbs_only(assumed.subnet)):
        return []  # bridges of virtual machines and containers, ports nobody set up: a subnet on every host, no wire
    addresses = Counter(port.address for port in _ports(assumed, hosts).values())
    found = []
    for host_id, port in _ports(assumed, hosts).items():
        if host_id in joined:
            continue
        peers = [hosts[other].name for other in (joined or assumed.ports) if other != host_id]
        problem = f"says {port.nic_class} in {assumed.subnet}, but reaches none of {some(peers)} there"
        fix = "check its cable, switch port, VLAN or partition key, and that the subnet is that of its wire"
        if addresses[port.address] > 1:
            problem += f"; its address {port.address} is also another host's"
            fix = "give every NIC an address of its own"
        found.append(TopologyFinding("unreachable", hosts[host_id].name, port.name, problem, fix))
    return found


def _line_rates(fabric: Fabric, hosts: Mapping[str, Host]) -> list[TopologyFinding]:
    if fabric.subnet == ROUTED or fabric.nic_class not in RDMA_CLASSES:
        return []  # Ethernets of different speed are common, and NICs of one RDMA fabric are bought together
    speeds = {host_id: port.speed_gbps for host_id, port in _ports(fabric, hosts).items() if port.speed_gbps}
    if len(speeds) < 3:
        return []
    median = statistics.median(speeds.values())
    return [
        TopologyFinding(
            "line rate",
            hosts[host_id].name,
            fabric.ports[host_id],
            f"says {speed:g} Gbit/s, where the others in {fabric.name} say {median:g}",
            "look at its cable and at the port's width and speed (ibstat, ethtool)",
        )
        for host_id, speed in speeds.items()
        if speed <= _UNEQUAL_SPEED * median
    ]


def _alone(hosts: Sequence[Host], assumed: Sequence[Fabric]) -> list[TopologyFinding]:
    """RDMA NICs whose subnet no other host shares, of hosts that so are in no fabric of the class that others have."""
    found = []
    for host in hosts:
        for port in host.ports:
            if (
                not port.is_rdma
                or is_verbs_only(port.subnet)
                or any(f.nic_class == port.nic_class and host.host_id in f.ports for f in assumed)
            ):
                continue
            others = [f for f in assumed if f.nic_class == port.nic_class]
            if others:
                problem = (
                    f"says {port.nic_class} in {port.subnet}, which no other host shares; "
                    f"{len(others[0].ports)} hosts have one in {others[0].subnet}"
                )
                fix = "give it an address in the subnet of the hosts that it is wired to"
                found.append(TopologyFinding("alone", host.name, port.name, problem, fix))
    return found


def _ports(fabric: Fabric, hosts: Mapping[str, Host]) -> dict[str, Port]:
    found = ((host_id, fabric.port_of(hosts[host_id])) for host_id in fabric.ports)
    return {host_id: port for host_id, port in found if port is not None}


def _majority(classes: Iterable[str]) -> tuple[str | None, bool]:
    """What most say, None where two classes are equally common; and whether there is another class at all."""
    ranked = Counter(classes).most_common()
    tied = len(ranked) > 1 and ranked[0][1] == ranked[1][1]
    return (None if tied or not ranked else ranked[0][0]), len(ranked) > 1
