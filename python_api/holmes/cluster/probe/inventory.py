"""What one rank sees of its own host."""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from holmes.cluster.topology import NodeInventory, Port
from holmes_comm import _C

_GPU_TIMEOUT_S = 10.0


def local_inventory(rank: int) -> NodeInventory:
    """Local. This host's NICs that are up and have an address, as `holmes_comm` discovers them."""
    ports = usable_ports([nic.to_dict() for nic in _C.discover_nics()])
    return NodeInventory(rank, _C.host_name(), _C.host_identity(), ports)


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
