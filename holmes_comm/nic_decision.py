"""From what every rank has to the NICs of a group: a pure function, the same on every rank."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

_CLASS_ORDER = ("infiniband", "roce", "ethernet", "loopback")
_PLAIN_KINDS = ("physical", "virtual_function", "bond", "loopback")  # before VLANs, bridges and the like, when equal


class Candidate(NamedTuple):
    """One address of a usable NIC of one rank."""

    nic: str
    nic_class: str  # "roce" for both versions
    kind: str
    link_layer: str
    wire: str  # a VLAN shares its parent's
    speed_gbps: float  # 0 where unknown
    address: str  # "10.0.0.1/24"
    has_gateway: bool

    @property
    def network(self) -> str:
        """The subnet, "10.0.0.0/24"."""
        return str(ipaddress.ip_interface(self.address).network)

    @property
    def ip(self) -> str:
        """The address without its prefix length."""
        return self.address.split("/")[0]


class Network(NamedTuple):
    """A network that all ranks share: for each rank its candidates, best first."""

    nic_class: str
    subnet: str
    speed_gbps: float  # of the slowest rank
    candidates: list[list[Candidate]]

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts the best network first."""
        subnet = ipaddress.ip_network(self.subnet)
        plain = all(ranked[0].kind in _PLAIN_KINDS for ranked in self.candidates)
        return (
            -self.speed_gbps,
            _CLASS_ORDER.index(self.nic_class),
            not plain,
            subnet.version,
            int(subnet.network_address),
            subnet.prefixlen,
        )


def decide(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks' records lead to: for every rank its (NIC, address) pairs and the reason, or the error."""
    size = len(records)
    wrong = [rank for rank, record in enumerate(records) if record["error"]]
    if wrong:
        first = records[wrong[0]]
        more = f" ({ranks_text(wrong[1:])} failed too)" if wrong[1:] else ""
        message = f"rank {wrong[0]} on host {first['host']}: {first['error']}{more}"
        system_errno = first.get("system_errno")
        return _error(message, records, wrong[0], first["nic"]) | {"system_errno": system_errno}
    named = [bool(record["cluster"]) for record in records]
    if any(named) and not all(named):
        bare = named.index(False)
        return _error(
            f"rank {bare} on host {records[bare]['host']} names no cluster, but rank {named.index(True)} names "
            f"{records[named.index(True)]['cluster']!r}; give every rank one (cluster= or HOLMES_CLUSTER), or none",
            records,
            bare,
            "",
        )
    one_place = len({record["place"] for record in records}) == 1
    if one_place and not any(record["restricts"] for record in records) and all(r["loopback"] for r in records):
        return {"choices": [[r["loopback"]] for r in records], "reason": f"loopback: all {size} ranks are on one host"}
    networks = _shared_networks(records, one_place)
    if networks:
        return _choose_rails(networks, size, min(record["max_rails"] for record in records))
    return _choose_routed(records) or (
        {"choices": [[] for _ in records], "reason": f"no NIC needed: all {size} ranks are on one host"}
        if one_place
        else _nothing_shared(records)
    )


def _shared_networks(records: list[dict[str, Any]], one_place: bool) -> list[Network]:
    """The networks in which every rank has a NIC, best first."""
    members: dict[tuple[str, str], list[list[Candidate]]] = {}
    for rank, record in enumerate(records):
        for candidate in record["candidates"]:
            if candidate.nic_class == "loopback" and not one_place:
                continue
            key = (candidate.link_layer, candidate.network)
            members.setdefault(key, [[] for _ in records])[rank].append(candidate)
    networks = []
    for (_, subnet), candidates in members.items():
        # The same address on two machines: not one network but two with equal numbers, as Docker's bridges are.
        owner: dict[str, str] = {}
        clash = any(
            owner.setdefault(candidate.ip, record["place"]) != record["place"]
            for record, ranked in zip(records, candidates, strict=True)
            for candidate in ranked
        )
        if clash or not all(candidates):
            continue
        for ranked in candidates:
            ranked.sort(key=lambda c: (-c.speed_gbps, c.kind not in _PLAIN_KINDS, _natural(c.nic), c.ip))
        classes = {ranked[0].nic_class for ranked in candidates}
        speed = min(ranked[0].speed_gbps for ranked in candidates)
        networks.append(Network(classes.pop() if len(classes) == 1 else "ethernet", subnet, speed, candidates))
    return sorted(networks, key=lambda network: network.order)


def _choose_rails(networks: list[Network], size: int, max_rails: int) -> dict[str, Any]:
    best = networks[0]
    same_class = [n for n in networks if n.nic_class == best.nic_class]
    choices: list[list[tuple[str, str]]] = [[] for _ in range(size)]
    used: list[set[str]] = [set() for _ in range(size)]
    subnets: list[str] = []
    for network in same_class:
        while len(subnets) < max_rails:
            free = [
                [c for c in ranked if c.wire not in wires and c.speed_gbps >= network.speed_gbps]
                for ranked, wires in zip(network.candidates, used, strict=True)
            ]
            if not all(free):
                break
            for rank, ranked in enumerate(free):
                choices[rank].append((ranked[0].nic, ranked[0].ip))
                used[rank].add(ranked[0].wire)
            subnets.append(network.subnet)
    speed = f" at {best.speed_gbps:g} Gbit/s" if best.speed_gbps else ""
    others = [n for n in networks if n.subnet not in subnets]
    rest = "; not " + ", ".join(f"{n.nic_class} {n.subnet}" for n in others) if others else ""
    return {
        "choices": choices,
        "reason": f"{best.nic_class} {', '.join(dict.fromkeys(subnets))}{speed}: the fastest network that all {size} "
        f"ranks share{rest}",
    }


def _choose_routed(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Ethernet with a gateway on every rank, each in its own subnet; None where a rank has none."""
    for version in (4, 6):
        routed = [
            sorted(
                (
                    c
                    for c in record["candidates"]
                    if c.has_gateway
                    and c.link_layer == "Ethernet"
                    and ipaddress.ip_interface(c.address).version == version
                ),
                key=lambda c: (c.nic_class != "ethernet", -c.speed_gbps, _natural(c.nic), c.ip),
            )
            for record in records
        ]
        if all(routed):
            return {
                "choices": [[(ranked[0].nic, ranked[0].ip)] for ranked in routed],
                "reason": f"routed Ethernet: the {len(records)} ranks share no network ({_who_has_what(records)}), so "
                "each uses its Ethernet NIC with a gateway",
            }
    return None


def _nothing_shared(records: list[dict[str, Any]]) -> dict[str, Any]:
    bare = next((rank for rank, record in enumerate(records) if not record["candidates"]), None)
    if bare is not None:
        message = (
            f"rank {bare} on host {records[bare]['host']} has no NIC that is up and has an address "
            f"(it has: {records[bare]['nics'] or 'no NIC at all'})"
        )
    else:
        message = f"the {len(records)} ranks share no network ({_who_has_what(records)}) and not all have a gateway"
    return _error(
        f"{message}. Fix: give every rank an interface in one subnet, or choose interfaces that reach each other with "
        "NicSelection(...) or HOLMES_NICS",
        records,
        bare,
        "",
    )


def _who_has_what(records: list[dict[str, Any]]) -> str:
    owners: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        for network in dict.fromkeys(f"{c.nic_class} {c.network}" for c in record["candidates"]):
            owners.setdefault(network, []).append(rank)
    return "; ".join(f"{network}: {ranks_text(ranks)}" for network, ranks in owners.items())


def ranks_text(ranks: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    plural = "s" if len(runs) > 1 or (runs and len(runs[0]) > 1) else ""
    return f"rank{plural} " + ", ".join("-".join(map(str, run)) for run in runs)


def _error(message: str, records: list[dict[str, Any]], peer: int | None, nic: str) -> dict[str, Any]:
    return {"error": message, "peer": peer, "host": "" if peer is None else records[peer]["host"], "nic": nic}


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
