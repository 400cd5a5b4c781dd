"""From what each rank sees of its own host to the topology of the job, in one collective call."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from holmes.cluster.probe.exchange import Exchange
from holmes.cluster.probe.rates import measure_topology
from holmes.cluster.probe.reach import confirm_fabrics
from holmes.cluster.probe.verbs import port_name, verbs_ports
from holmes.cluster.topology import (
    VERBS,
    Host,
    NodeInventory,
    Port,
    Topology,
    candidate_fabrics,
    make_topology,
    merge_hosts,
)
from holmes.cluster.topology.contradictions import MIXED, contradictions, mixed_wires
from holmes_comm import _C
from holmes_comm.errors import UsageError

_GPU_TIMEOUT_S = 10.0
_GID_PREFIX_LENGTH = 64


def discover_topology(
    store: Any, rank: int, size: int, name: str, timeout_s: float = 3.0, measure_s: float = 3.0
) -> Topology:
    """Collective over `size` ranks: their inventories, merged, every fabric confirmed by connections and measured.

    `name` must be new in the store; `timeout_s` bounds one connection attempt, `measure_s` (0: nothing is measured) the
    tournaments of the measurement, which in all takes at most about twice that. Equal result on all ranks.

    Raises UsageError where a time is none.
    """
    if not 0 < timeout_s < math.inf or not 0 <= measure_s < math.inf:
        raise UsageError(
            f"timeout_s={timeout_s!r}, measure_s={measure_s!r}: seconds, timeout_s above 0 and measure_s 0 (nothing is "
            "measured) or more; leave them out for the usual ones"
        )
    exchange = Exchange(store, rank, size, name)
    mine = local_inventory(rank)
    entries = exchange.all_gather([mine.host, mine.host_id, [vars(port) for port in mine.ports]])
    inventories = [
        NodeInventory(r, host, host_id, tuple(Port(**port) for port in ports))
        for r, (host, host_id, ports) in enumerate(entries)
    ]
    hosts = merge_hosts(inventories)
    leads = {host.ranks[0] for host in hosts}
    gpus = exchange.all_gather(local_gpu() if rank in leads else None)
    hosts = tuple(_with_gpu(host, gpus[host.ranks[0]]) for host in hosts)
    assumed = candidate_fabrics(hosts)
    tried = confirm_fabrics(exchange, hosts, [*assumed, *mixed_wires(hosts)], timeout_s)
    fabrics = [fabric for fabric in tried if fabric.nic_class != MIXED]
    wires = [fabric for fabric in tried if fabric.nic_class == MIXED]
    findings = contradictions(hosts, assumed, fabrics, wires)
    if measure_s <= 0:
        return make_topology(hosts, fabrics, findings)
    return measure_topology(exchange, hosts, fabrics, findings, measure_s, timeout_s)


def _with_gpu(host: Host, gpu: Sequence[Any] | None) -> Host:
    return host if gpu is None else dataclasses.replace(host, gpu=gpu[0], gpu_memory_gib=gpu[1])


def local_inventory(rank: int) -> NodeInventory:
    """Local. This host's NICs that are up and have an address, as `holmes_comm` discovers them, then its RDMA ports
    that have none and can be opened by verbs."""
    nics = [nic.to_dict() for nic in _C.discover_nics()]
    ports = usable_ports(nics)
    named = {port.name for port in ports}
    bare = verbs_ports(nic for nic in nics if nic["name"] not in named)
    return NodeInventory(rank, _C.host_name(), _C.host_identity(), (*ports, *map(_without_address, bare)))


def _without_address(nic: Mapping[str, Any]) -> Port:
    gid = next((gid for gid in nic["gids"] if gid["index"] == nic["gid_index"]), nic["gids"][0])["gid"]
    address = ipaddress.ip_address(gid)
    network = ipaddress.ip_network((address, _GID_PREFIX_LENGTH), strict=False)
    return Port(port_name(nic), nic["nic_class"], str(address), f"{VERBS}{network}", nic["speed_gbps"])


def local_gpu() -> tuple[str, float] | None:
    """Local. Type and memory in GiB of this host's GPUs, as nvidia-smi tells; None without it or where they differ."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True).stdout
        gpus = {tuple(line.rsplit(", ", 1)) for line in listed.splitlines() if line.strip()}
        if len(gpus) != 1:
            return None
        name, memory_mib = gpus.pop()
        return name, round(float(memory_mib) / 1024, 1)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None  # a driver that does not answer is no reason to fail: the type is only told, never relied on


def usable_ports(nics: Sequence[dict[str, Any]]) -> tuple[Port, ...]:
    """Of discovered NICs (as dicts) those that are up with an address that is not link-local; the first such counts."""
    ports = []
    for nic in nics:
        if nic["nic_class"] == "loopback" or not nic["is_netdev_up"]:
            continue
        routable = [text for text in nic["addresses"] if not ipaddress.ip_interface(text).is_link_local]
        if routable:
            address = ipaddress.ip_interface(routable[0])
            place = (nic["name"], nic["nic_class"], str(address.ip), str(address.network))
            ports.append(Port(*place, nic["speed_gbps"], nic["has_gateway"], nic["parent"]))
    return tuple(ports)
