"""How the ranks of a group agree on the NICs they use."""

from __future__ import annotations

import ipaddress
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from holmes_comm import errors
from holmes_comm._C import Nic, discover_nics
from holmes_comm.descriptors import check_descriptors
from holmes_comm.nic_decision import Candidate, decide, ranks_text
from holmes_comm.nic_selection import NicSelection, host_name, is_link_local, summarize

_PROBE = timedelta(milliseconds=10)  # to ask whether a key exists; a store has no other question for it


class Store(Protocol):
    """What agree_group needs of a store; any torch.distributed Store has it."""

    def set(self, key: str, value: str, /) -> object:
        """Sets `key`."""

    def get(self, key: str, /) -> bytes:
        """Returns the value of `key`, which exists."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> object:
        """Waits until all `keys` exist; raises after `timeout`."""


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
        Candidate(
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
        "timeout": f"{ranks_text(missing)} of {size} did not take part in choosing the NICs within {timeout_s:g} s: "
        "check that every rank is running and makes this call, and that all reach the store",
        "peer": missing[0],
    }


def _collect_and_decide(store: Store, size: int, deadline: float, key_prefix: str, timeout_s: float) -> dict[str, Any]:
    records = []
    for rank in range(size):
        if not wait_for(store, f"{key_prefix}/nics/{rank}", deadline):
            return _missing(store, size, key_prefix, timeout_s)
        records.append(json.loads(store.get(f"{key_prefix}/nics/{rank}")))
    for record in records:
        record["candidates"] = [Candidate(*fields) for fields in record["candidates"]]
    return decide(records) | {
        "clusters": [record["cluster"] for record in records],
        "streams": min(record["streams"] for record in records),
    }


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
