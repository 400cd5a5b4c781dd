"""Addresses: used twice, several NICs in one subnet, host names, the loopback device."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator

from holmes.tools.doctor.facts import HostFacts, JobFacts, NicFacts
from holmes.tools.doctor.finding import ERROR, WARNING, Finding

_STRICT = 1  # rp_filter, RFC 3704


def check_duplicates(job: JobFacts) -> Iterator[Finding]:
    """No two NICs have one address. Bridges of containers, alike on every host, are no ways to other hosts."""
    places: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for host in job.hosts:
        for nic in host.wires:
            places[nic.ip].append((host.name, nic.name))
    for address, owners in places.items():
        for owner in owners if len(owners) > 1 else ():
            others = ", ".join(" ".join(other) for other in owners if other != owner)
            yield Finding(
                ERROR,
                "duplicate address",
                *owner,
                f"its address {address} is also that of {others}; an address may be used once",
                "give every NIC an address of its own (ip address change, or the network's DHCP reservations)",
            )


def check_subnets(job: JobFacts) -> Iterator[Finding]:
    """Several NICs of a host in one subnet: packets leave by the right one, answers are not dropped."""
    for host in job.hosts:
        together: dict[str, list[NicFacts]] = defaultdict(list)
        for nic in host.wires:
            together[nic.subnet].append(nic)
        for subnet, nics in together.items():
            if len(nics) > 1:
                yield from _shared_subnet(host, subnet, nics)


def _shared_subnet(host: HostFacts, subnet: str, nics: list[NicFacts]) -> Iterator[Finding]:
    names = " and ".join(nic.name for nic in nics)
    for number, nic in enumerate(nics):
        if nic.egress is not None and nic.egress != nic.name:
            yield Finding(
                WARNING,
                "wrong egress",
                host.name,
                nic.name,
                f"{names} share subnet {subnet}, and the kernel sends what comes from {nic.ip} out of {nic.egress}; "
                "Holmes binds its sockets to the NIC, NCCL's and Gloo's do not and use one NIC for both",
                f"one subnet for each NIC; or a table of its own: ip route add {subnet} dev {nic.name} table "
                f"{100 + number}; ip rule add from {nic.ip} table {100 + number}",
            )
        if nic.arp_filter == 0 and nic.arp_ignore == 0:
            yield Finding(
                WARNING,
                "arp",
                host.name,
                nic.name,
                f"{names} share subnet {subnet} with arp_filter=0 and arp_ignore=0: each answers for the other's "
                "address, so peers send to the wrong NIC",
                f"sysctl -w net.ipv4.conf.{nic.name}.arp_ignore=1 net.ipv4.conf.{nic.name}.arp_announce=2",
            )
        if nic.rp_filter == _STRICT:
            yield Finding(
                WARNING,
                "rp_filter",
                host.name,
                nic.name,
                f"rp_filter=1 (strict), and {names} share subnet {subnet}: what arrives on a NIC that is not the "
                "route back is dropped without a word",
                f"sysctl -w net.ipv4.conf.all.rp_filter=2 net.ipv4.conf.{nic.name}.rp_filter=2 (loose)",
            )


def check_host_names(job: JobFacts) -> Iterator[Finding]:
    """A host's own name means an address that others reach: Gloo and torchrun's rendezvous advertise it."""
    for host in job.hosts:
        facts = host.facts
        own = {ipaddress.ip_interface(nic.address).ip for nic in facts.nics if nic.address}
        found = [ipaddress.ip_address(address) for address in facts.hostname_addresses]
        fix = f"in /etc/hosts, give {facts.host} the address that other hosts use, or set GLOO_SOCKET_IFNAME"
        if not found:
            yield Finding(WARNING, "host name", host.name, "", f"its name {facts.host!r} resolves to no address", fix)
        elif all(address.is_loopback for address in found):
            told = "GLOO_SOCKET_IFNAME" in facts.variables
            yield Finding(
                ERROR if len(job.hosts) > 1 and not told else WARNING,
                "host name",
                host.name,
                "",
                f"its name {facts.host!r} resolves to {found[0]}, which means another host everywhere else",
                fix,
            )
        elif not any(address in own or address.is_loopback or address.is_link_local for address in found):
            yield Finding(
                WARNING,
                "host name",
                host.name,
                "",
                f"its name {facts.host!r} resolves to {found[0]}, which is no address of its NICs",
                fix,
            )


def check_loopback(job: JobFacts) -> Iterator[Finding]:
    """A host reaches itself: its ranks each other, and the store on it; a new network namespace begins without that."""
    for host in job.hosts:
        for nic in host.facts.nics:
            if nic.nic_class == "loopback" and not nic.is_netdev_up:
                yield Finding(
                    ERROR,
                    "loopback",
                    host.name,
                    nic.name,
                    "the loopback device is down: nothing on this host reaches 127.0.0.1 or the host's own addresses, "
                    "and torchrun's rendezvous there waits for half an hour",
                    f"ip link set {nic.name} up",
                )
