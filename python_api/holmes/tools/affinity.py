"""How near each GPU of a host is to each of its NICs, in the words of `nvidia-smi topo -m`, from PCI paths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holmes_comm.nics import Nic

__all__ = ["MEANINGS", "affinity", "placed"]

#: The nearest first.
MEANINGS = {
    "PIX": "below one PCIe switch",
    "PXB": "several PCIe switches, but not over the processor",
    "PHB": "over one PCIe host bridge of the processor",
    "NODE": "over several host bridges of one NUMA node",
    "SYS": "over the link between NUMA nodes",
}
_WORDS = tuple(MEANINGS)
_PORT_AND_DEVICE = 2  # what is below a switch's upper port: one of its lower ports, and the device there


def placed(nics: Iterable[Nic]) -> list[Nic]:
    """Those with a place on the PCI bus: their own, or their members'. VLANs and IPoIB children have their parent's."""
    found = {nic.name: nic for nic in nics}
    return [nic for nic in found.values() if not nic.parent and _places(nic, found)]


def affinity(gpus: Sequence[Mapping[str, Any]], nics: Sequence[Nic]) -> list[list[str]]:
    """A row for each GPU (of `discover_gpus`), a word for each of `nics`; of a bond's members the nearest counts."""
    found = {nic.name: nic for nic in nics}
    places = [_places(nic, found) for nic in nics]
    return [
        [min((_word(gpu["pci_path"], gpu["numa_node"], *place) for place in at), key=_WORDS.index) for at in places]
        for gpu in gpus
    ]


def _places(nic: Nic, found: Mapping[str, Nic]) -> list[tuple[str, int | None]]:
    if nic.pci_path:
        return [(nic.pci_path, nic.numa_node)]
    members = (found[name] for name in nic.members if name in found)
    return [(member.pci_path, member.numa_node) for member in members if member.pci_path]


def _word(path: str, numa_node: int | None, other: str, other_node: int | None) -> str:
    """Of two devices by their paths below the sysfs root. Where the kernel knows no NUMA nodes, all is one."""
    parts, others = path.split("/"), other.split("/")
    common = next(
        (n for n, (a, b) in enumerate(zip(parts, others, strict=False)) if a != b), min(map(len, (parts, others)))
    )
    below = [part for part in parts[:common] if not part.startswith(("devices", "pci"))]
    if below:
        return "PIX" if max(len(parts), len(others)) - common <= _PORT_AND_DEVICE else "PXB"
    if any(part.startswith("pci") for part in parts[:common]):
        return "PHB"
    return "NODE" if numa_node == other_node else "SYS"
