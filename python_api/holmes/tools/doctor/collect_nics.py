"""Collects this host's NICs with the settings of their interfaces, and which way the kernel really sends."""

from __future__ import annotations

import ipaddress
import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from holmes.tools.doctor.facts import NicFacts

_CONF = Path("/proc/sys/net/ipv4/conf")
_TIMEOUT_S = 5.0


def collect_nics() -> tuple[NicFacts, ...]:
    """Local."""
    from holmes_comm import discover_nics

    found = [nic.to_dict() for nic in discover_nics()]
    subnets = Counter(_subnet(_address(nic)) for nic in found if nic["is_netdev_up"])
    return tuple(_facts(nic, shares_subnet=subnets[_subnet(_address(nic))] > 1) for nic in found)


def _facts(nic: dict[str, Any], *, shares_subnet: bool) -> NicFacts:
    address, netdev = _address(nic), nic["netdev"]
    return NicFacts(
        name=nic["name"],
        nic_class=nic["nic_class"],
        kind=nic["kind"],
        is_up=nic["is_up"],
        is_netdev_up=nic["is_netdev_up"],
        address=address,
        mtu=nic["mtu"],
        speed_gbps=nic["speed_gbps"],
        has_gateway=nic["has_gateway"],
        hca=nic["hca"],
        state=nic["state"],
        has_interface=bool(netdev),
        master=nic["master"],
        parent=nic["parent"],
        gids=tuple({key: gid[key] for key in ("index", "gid", "type")} for gid in nic["gids"]),
        gid_index=nic["gid_index"],
        rdma_mtu=_rdma_mtu(f"{nic['hca']}:{nic['port'] or 1}") if nic["hca"] else None,
        rp_filter=_setting(netdev, "rp_filter"),
        arp_filter=_setting(netdev, "arp_filter"),
        arp_ignore=_setting(netdev, "arp_ignore"),
        egress=_egress(address) if shares_subnet and address and nic["is_netdev_up"] else None,
    )


def _address(nic: dict[str, Any]) -> str:
    """The address that is used, with its prefix length: the first that is not link-local, as in a topology."""
    return next((text for text in nic["addresses"] if not ipaddress.ip_interface(text).is_link_local), "")


def _subnet(address: str) -> str:
    return str(ipaddress.ip_interface(address).network) if address else ""


def _rdma_mtu(port: str) -> int | None:
    """None where verbs cannot be asked: transport rdma says why."""
    from holmes_comm import _C, HolmesError

    try:
        return _C.rdma_mtu(port)
    except HolmesError:
        return None


def _setting(netdev: str, name: str) -> int | None:
    """The kernel takes the larger one of "all" and the interface's own."""
    values = []
    for place in ("all", netdev):
        try:
            values.append(int((_CONF / place / name).read_text()))
        except (OSError, ValueError):
            return None
    return max(values)


def _egress(address: str) -> str | None:
    """The interface by which the kernel sends from this address to another one of its subnet; None: not to be told."""
    ip = shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin") or shutil.which("ip")
    own = ipaddress.ip_interface(address)
    if ip is None or own.network.num_addresses < 4:
        return None
    other = next(host for host in own.network.hosts() if host != own.ip)
    command = [ip, "-j", "route", "get", str(other), "from", str(own.ip)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        return str(json.loads(result.stdout)[0]["dev"])
    except (OSError, subprocess.SubprocessError, ValueError, LookupError):
        return None
