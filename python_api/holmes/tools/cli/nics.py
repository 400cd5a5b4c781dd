"""`holmes nics`: the NICs of this host, as a table or as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from holmes.tools.cli.output import JsonFile, show
from holmes_comm.nics import Nic, discover_nics

_CLASS_TEXT = {
    "infiniband": "InfiniBand",
    "roce_v2": "RoCE v2",
    "roce_v1": "RoCE v1",
    "ethernet": "Ethernet",
    "loopback": "loopback",
}

_INDENT = "    "
_ANY_WIDTH = 10_000


def nics(
    json_file: JsonFile = None,
    sysfs_root: Annotated[
        Path | None, typer.Option(help="Read this folder instead of HOLMES_SYSFS_ROOT or /sys.")
    ] = None,
) -> None:
    """Lists this host's NICs: class, speed, state, addresses, GID, PCI place and nearest GPUs."""
    found = discover_nics(None if sysfs_root is None else str(sysfs_root))
    show(json_file, [nic.to_dict() for nic in found], lambda: print_nics(Console(), found))


def print_nics(console: Console, found: Iterable[Nic]) -> None:
    """A table of `found`, one NIC a row; where the console is too narrow for whole words and addresses, a paragraph for
    each NIC."""
    found = list(found)
    table = nic_table(found)
    if Measurement.get(console, console.options.update(max_width=_ANY_WIDTH), table).maximum <= console.width:
        console.print(table)
        return
    for nic in found:
        console.print(_paragraph(nic, console.width), style=None if nic.is_up else "dim", soft_wrap=True)


def _paragraph(nic: Nic, width: int) -> Text:
    """The name and the state, then what the table has, wrapped between words."""
    speed = None if nic.speed_gbps is None else f"{nic.speed_gbps:g} Gbit/s"
    gpus = " ".join(map(_short_pci, nic.nearest_gpus))
    named = {"MTU": nic.mtu, "NUMA": nic.numa_node, "PCI": _short_pci(nic.pci_address), "GID": nic.gid_index}
    facts = [_CLASS_TEXT[nic.nic_class], _kind(nic), speed, _port(nic)]
    facts += [f"{name} {value}" for name, value in named.items() if value not in (None, "")]
    facts += [*nic.addresses, gpus and f"nearest GPUs {gpus}"]
    text = ", ".join(filter(None, facts))
    lines = textwrap.wrap(text, width - len(_INDENT), break_long_words=False, break_on_hyphens=False)
    return Text.assemble((nic.name, "bold"), " ", _state(nic, ", "), *(f"\n{_INDENT}{line}" for line in lines))


def nic_table(found: Iterable[Nic]) -> Table:
    """A rich table of `found`, one NIC a row."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("NIC", "class", "state", "Gbit/s", "MTU", "NUMA", "PCI", "addresses", "GID", "nearest GPUs"):
        numeric = header in ("Gbit/s", "MTU", "NUMA", "GID")
        table.add_column(header, justify="right" if numeric else "left", no_wrap=header == "NIC", overflow="fold")
    for nic in found:
        table.add_row(
            Text(f"{nic.name}\n{_port(nic)}".rstrip()),
            Text(f"{_CLASS_TEXT[nic.nic_class]}\n{_kind(nic)}".rstrip()),
            _state(nic),
            _or_dash(None if nic.speed_gbps is None else f"{nic.speed_gbps:g}"),
            _or_dash(nic.mtu),
            _or_dash(nic.numa_node),
            _or_dash(_short_pci(nic.pci_address)),
            _or_dash("\n".join(nic.addresses)),
            _or_dash(nic.gid_index),
            _or_dash("\n".join(" ".join(row) for row in _in_pairs([_short_pci(gpu) for gpu in nic.nearest_gpus]))),
            style=None if nic.is_up else "dim",
        )
    return table


def _port(nic: Nic) -> str:
    return nic.port_name if nic.port_name != nic.name else ""


def _kind(nic: Nic) -> str:
    """What the NIC is beside a plain physical one."""
    if nic.kind == "bond" or nic.kind == "bridge":
        return f"{nic.kind} of {', '.join(nic.members)}" if nic.members else str(nic.kind)
    if nic.kind == "vlan":
        return f"VLAN {nic.vlan_id if nic.vlan_id is not None else ''} on {nic.parent}"
    if nic.kind == "virtual_function":
        return f"virtual function{f' of {_short_pci(nic.physical_function)}' if nic.physical_function else ''}"
    if nic.kind == "ipoib":
        return f"IPoIB on {nic.parent}"
    plain = nic.kind in ("physical", "loopback")
    return f"in {nic.master}" if nic.master and plain else "" if plain else str(nic.kind)


def _state(nic: Nic, separator: str = "\n") -> Text:
    text = Text(nic.state, style="green" if nic.is_up else "red")
    if nic.is_up and nic.netdev and not nic.is_netdev_up:
        text.append(f"{separator}{nic.netdev} down", style="red")
    return text


def _short_pci(address: str) -> str:
    """Without the domain where it is the first one."""
    return address.removeprefix("0000:")


def _in_pairs(items: list[str]) -> list[list[str]]:
    return [items[i : i + 2] for i in range(0, len(items), 2)]


def _or_dash(value: object) -> str:
    return "-" if value is None or value == "" else str(value)
