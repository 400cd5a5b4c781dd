"""Trials: neighbours try connections from NIC to NIC, and note how an attempt failed, not only that it did."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holmes.cluster.probe import Exchange, Responder, ask_token
from holmes.cluster.topology import ROUTED, Host, candidate_fabrics
from holmes.tools.doctor.facts import HostFacts, NicFacts, Trial, ports_of

_NEIGHBOURS = 2  # hosts that each host of a fabric tries: one alone could not tell whose fault it is
_REPEATS = 3  # connections for the quickest round trip
_PARALLEL = 32
_ARP_COMPLETE = 0x2  # ATF_COM of linux/if_arp.h


def try_connections(exchange: Exchange, hosts: Sequence[HostFacts], timeout_s: float) -> list[Trial]:
    """Collective. Each host tries its next neighbours in every network that the NICs suggest; all trials, on all ranks.

    Listens on ports of HOLMES_PORT_RANGE where that is set. Takes about `timeout_s`, and O(hosts) connections.
    """
    me = next(host for host in hosts if exchange.rank in host.ranks)
    leads = exchange.rank == me.ranks[0]
    addresses = [nic.ip for nic in me.wires] if leads else []
    with Responder(addresses, listening_ports(os.environ.get("HOLMES_PORT_RANGE"))) as responder:
        answers = exchange.all_gather([responder.token, responder.ports])
        wanted = []
        for nic, other, other_nic in neighbours(me, hosts) if leads else ():
            token, ports = answers[other.ranks[0]]
            if other_nic.ip in ports:
                wanted.append((me.name, nic, other.name, other_nic, ports[other_nic.ip], token, timeout_s))
        with ThreadPoolExecutor(max_workers=_PARALLEL) as pool:
            mine = list(pool.map(lambda arguments: attempt(*arguments), wanted))
        gathered = exchange.all_gather([vars(trial) for trial in mine])  # nobody stops answering before all have tried
    return [Trial(**trial) for trials in gathered for trial in trials]


def listening_ports(port_range: str | None) -> Sequence[int]:
    """The ports of HOLMES_PORT_RANGE; any (0) where it is unset or wrong, which another check reports."""
    first, _, last = (port_range or "").partition("-")
    if first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 65536:
        return range(int(first), int(last) + 1)
    return (0,)


def neighbours(me: HostFacts, hosts: Sequence[HostFacts]) -> Iterator[tuple[NicFacts, HostFacts, NicFacts]]:
    """What a host tries: own NIC, other host, its NIC. In a ring, so that every host is tried by as many others."""
    by_id = {host.facts.host_id: host for host in hosts}
    mine = {nic.name: nic for nic in me.wires}
    merged = [Host(host.name, host.facts.host_id, host.ranks, ports_of(host.facts)) for host in hosts]
    tried = set()
    for fabric in candidate_fabrics(merged):
        members = list(fabric.ports)
        own = mine.get(fabric.ports.get(me.facts.host_id, ""))
        if fabric.subnet == ROUTED or own is None:
            continue
        place = members.index(me.facts.host_id)
        for step in range(1, min(_NEIGHBOURS, len(members) - 1) + 1):
            other = by_id[members[(place + step) % len(members)]]
            nic = next((nic for nic in other.wires if nic.name == fabric.ports[other.facts.host_id]), None)
            # Two hosts with one address: another check reports them.
            if nic is not None and nic.ip != own.ip and (own.name, nic.ip) not in tried:
                tried.add((own.name, nic.ip))
                yield own, other, nic


def attempt(
    source: str, source_nic: NicFacts, target: str, target_nic: NicFacts, port: int, token: str, timeout_s: float
) -> Trial:
    """Local. Connects from one NIC's address to another's and expects the token."""
    outcome, round_trip_s = ask_token(source_nic.ip, target_nic.ip, port, token, timeout_s)
    for _ in range(_REPEATS - 1):
        if outcome != "ok" or round_trip_s is None:
            break
        again, again_s = ask_token(source_nic.ip, target_nic.ip, port, token, timeout_s)
        round_trip_s = min(round_trip_s, again_s) if again == "ok" and again_s is not None else round_trip_s
    has_arp = None if outcome == "ok" else known_to_arp(target_nic.ip)
    place = (source, source_nic.name, target, target_nic.name, target_nic.subnet, target_nic.ip, port)
    return Trial(*place, outcome, has_arp, round_trip_s)


def known_to_arp(address: str, table: Path = Path("/proc/net/arp")) -> bool | None:
    """Whether the kernel has this IPv4 address's hardware address; None: cannot be told (IPv6, or not tried lately)."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return None
    flags = [int(row[2], 16) for row in rows if row[0] == address]
    return any(flag & _ARP_COMPLETE for flag in flags) if flags else None
