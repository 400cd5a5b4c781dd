"""How the ranks of a group agree on the NICs they use."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from holmes_comm import errors
from holmes_comm._C import Nic, discover_nics
from holmes_comm.descriptors import check_descriptors
from holmes_comm.nic_selection import NicSelection, host_name, is_link_local, summarize

_CLASS_ORDER = ("infiniband", "roce", "ethernet", "loopback")
_PLAIN_KINDS = ("physical", "virtual_function", "bond", "loopback")  # before VLANs, bridges and the like, when equal
_PROBE = timedelta(milliseconds=10)  # to ask whether a key exists; a store has no other question for it


class Store(Protocol):
    """What agree_group needs of a store; any torch.distributed Store has it."""

    def set(self, key: str, value: str, /) -> object:
        """Sets `key`."""

    def get(self, key: str, /) -> bytes:
        """Returns the value of `key`, which exists."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> object:
        """Waits until all `keys` exist; raises after `timeout`."""


class _Candidate(NamedTuple):
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
        return str(ipaddress.ip_interface(self.address).network)

    @property
    def ip(self) -> str:
        return self.address.split("/")[0]


class _Network(NamedTuple):
    """A network that all ranks share: for each rank its candidates, best first."""

    nic_class: str
    subnet: str
    speed_gbps: float  # of the slowest rank
    candidates: list[list[_Candidate]]

    @property
    def order(self) -> tuple[Any, ...]:
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


class Agreement(NamedTuple):
    """What the ranks of a group agreed on: this rank's NICs, the reason, and the cluster every rank names."""

    nics: list[Nic]
    reason: str
    clusters: list[str]


def agree_group(
    store: Store,
    rank: int,
    size: int,
    selection: NicSelection | None = None,
    *,
    timeout_s: float,
    key_prefix: str,
    sysfs_root: str | os.PathLike[str] | None = None,
    max_rails: int | None = None,
    cluster: str = "",
) -> Agreement:
    """Chooses, together with the other ranks, the NICs the group uses. Collective over the `size` ranks of `store`.

    Returns this rank's NICs (rails, in the same order on every rank; bind `nic.address` of `nic.netdev`; all of them
    again for each further stream), the reason in words, and every rank's `cluster`. The choice is the fastest network
    (link layer and subnet) in which every rank has a usable NIC, by the speed of its slowest member; InfiniBand before
    RoCE before Ethernet where speeds are equal. RoCE on some ranks and plain Ethernet on others of one subnet counts as
    Ethernet. Where no network is shared: Ethernet with a gateway on every rank. Where all ranks are on one host and
    `selection` asks for nothing: loopback; the list may then be empty.

    selection: what to choose from; None: HOLMES_NICS and HOLMES_TRANSPORT. It may differ between ranks.
    timeout_s: seconds to wait for the other ranks. key_prefix: keys used in the store; a fresh one for every call.
    sysfs_root: as in discover_nics. max_rails: return up to so many NICs of the best network's class, fastest first;
    None: what the selections say, the smallest number where they differ. cluster: name of this rank's cluster; all
    ranks or none have one.
    Raises on every rank: NicError where a rank's selection is wrong, nothing is shared or only some name a cluster,
    SystemError where a rank has no descriptors left to look at its NICs, TimeoutError where one did not take part; all
    name the rank and its host.
    """
    deadline = time.monotonic() + timeout_s
    nics: list[Nic] = []
    try:
        check_descriptors()
        nics = discover_nics(None if sysfs_root is None else os.fspath(sysfs_root))
        selection = NicSelection.from_env() if selection is None else selection
        record = _describe(nics, selection) | {
            "max_rails": selection.max_rails if max_rails is None else max_rails,
            "streams": selection.streams,
            "cluster": cluster,
        }
    except (errors.HolmesError, OSError) as error:
        system_errno = error.errno if isinstance(error, OSError) else None
        if isinstance(error, errors.SystemError):
            system_errno = error.system_errno
        record = _record(error=str(error), nic=getattr(error, "nic", "") or "", system_errno=system_errno)
    store.set(f"{key_prefix}/nics/{rank}", json.dumps(record))
    decision_key = f"{key_prefix}/nics/decision"
    if rank == 0:
        decision = _collect_and_decide(store, size, deadline, key_prefix, timeout_s)
        store.set(decision_key, json.dumps(decision))
    elif not wait_for(store, decision_key, deadline):
        decision = _missing(store, size, key_prefix, timeout_s)
    else:
        decision = json.loads(store.get(decision_key))
    _raise_error(decision, rank)
    by_name = {nic.name: nic for nic in nics}
    rails = [by_name[name].with_address(ip) for name, ip in decision["choices"][rank]]
    return Agreement(rails * decision["streams"], decision["reason"], decision["clusters"])


def agree_nics(
    store: Store, rank: int, size: int, selection: NicSelection | None = None, **options: Any
) -> tuple[list[Nic], str]:
    """As agree_group, for a group without clusters: this rank's NICs and the reason. Collective."""
    agreement = agree_group(store, rank, size, selection, **options)
    return agreement.nics, agreement.reason


def _record(**changes: Any) -> dict[str, Any]:
    return {
        "host": host_name(),
        "place": _place(),
        "candidates": [],
        "loopback": None,
        "max_rails": 1,
        "cluster": "",
        "streams": 1,
        "restricts": False,
        "error": "",
        "system_errno": None,
        "nic": "",
        "nics": "",
    } | changes


def _place() -> str:
    """Identifies the machine and its network namespace: ranks of one place share their interfaces."""
    boot_id, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    try:
        return f"{boot_id.read_text().strip()}/{namespace.stat().st_ino}"
    except OSError:  # not shown here, or no descriptor is left
        return f"{host_name()}/{host_name()}"


def _describe(nics: list[Nic], selection: NicSelection) -> dict[str, Any]:
    usable = selection.resolve(nics)
    subnet = ipaddress.ip_network(selection.subnet) if selection.subnet else None
    candidates = [
        _Candidate(
            nic.name,
            "roce" if nic.nic_class.startswith("roce") else nic.nic_class,
            nic.kind,
            nic.link_layer,
            nic.parent or nic.name,
            nic.speed_gbps or 0.0,
            address,
            nic.has_gateway,
        )
        for nic in usable
        for address in nic.addresses
        if (ipaddress.ip_interface(address).ip in subnet if subnet else not is_link_local(address))
    ]
    loopback = next(((nic.name, nic.address) for nic in nics if nic.nic_class == "loopback" and nic.address), None)
    return _record(
        candidates=candidates,
        loopback=loopback,
        restricts=selection.restricts,
        nics="; ".join(map(summarize, nics)),
    )


def wait_for(store: Store, key: str, deadline: float) -> bool:
    """Whether `key` is there by `deadline` (as time.monotonic counts)."""
    remaining = max(timedelta(seconds=deadline - time.monotonic()), _PROBE)
    try:
        store.wait([key], remaining)
    except (RuntimeError, OSError):  # torch's DistStoreError, TimeoutError, HolmesError
        return False
    return True


def _missing(store: Store, size: int, key_prefix: str, timeout_s: float) -> dict[str, Any]:
    """Decision of a rank that waited in vain: names the ranks that said nothing."""
    now = time.monotonic()
    missing = [rank for rank in range(size) if not wait_for(store, f"{key_prefix}/nics/{rank}", now)] or [0]
    return {
        "timeout": f"{_ranks(missing)} of {size} did not take part in choosing the NICs within {timeout_s:g} s: check "
        "that every rank is running and makes this call, and that all reach the store",
        "peer": missing[0],
    }


def _collect_and_decide(store: Store, size: int, deadline: float, key_prefix: str, timeout_s: float) -> dict[str, Any]:
    records = []
    for rank in range(size):
        if not wait_for(store, f"{key_prefix}/nics/{rank}", deadline):
            return _missing(store, size, key_prefix, timeout_s)
        records.append(json.loads(store.get(f"{key_prefix}/nics/{rank}")))
    for record in records:
        record["candidates"] = [_Candidate(*fields) for fields in record["candidates"]]
    return decide(records) | {
        "clusters": [record["cluster"] for record in records],
        "streams": min(record["streams"] for record in records),
    }


def decide(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks' records lead to: for every rank its (NIC, address) pairs and the reason, or the error."""
    size = len(records)
    wrong = [rank for rank, record in enumerate(records) if record["error"]]
    if wrong:
        first = records[wrong[0]]
        more = f" ({_ranks(wrong[1:])} failed too)" if wrong[1:] else ""
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


def _shared_networks(records: list[dict[str, Any]], one_place: bool) -> list[_Network]:
    """The networks in which every rank has a NIC, best first."""
    members: dict[tuple[str, str], list[list[_Candidate]]] = {}
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
        networks.append(_Network(classes.pop() if len(classes) == 1 else "ethernet", subnet, speed, candidates))
    return sorted(networks, key=lambda network: network.order)


def _choose_rails(networks: list[_Network], size: int, max_rails: int) -> dict[str, Any]:
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
    return "; ".join(f"{network}: {_ranks(ranks)}" for network, ranks in owners.items())


def _ranks(ranks: Iterable[int]) -> str:
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


def _raise_error(decision: dict[str, Any], rank: int) -> None:
    peer = decision.get("peer")
    peer = None if peer == rank else peer
    if "timeout" in decision:
        raise errors.TimeoutError(decision["timeout"], rank=rank, peer=peer)
    if "error" in decision:
        system_errno = decision.get("system_errno")
        kind = errors.NicError if system_errno is None else errors.SystemError
        place = {"host": decision["host"], "nic": decision["nic"], "system_errno": system_errno}
        raise kind(decision["error"], rank=rank, peer=peer, **place)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
