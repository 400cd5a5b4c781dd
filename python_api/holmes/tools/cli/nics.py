"""`holmes nics`: the NICs of this host, as a table or as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from holmes.tools.affinity import MEANINGS, affinity, placed
from holmes.tools.cli.output import JsonFile, plain_console, show
from holmes.words import count
from holmes_comm.nics import Nic, discover_gpus, discover_nics

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
    matrix: Annotated[
        bool, typer.Option("--matrix", help="How near each GPU is to each NIC, as `nvidia-smi topo -m` says it.")
    ] = False,
    json_file: JsonFile = None,
    sysfs_root: Annotated[
        Path | None, typer.Option(help="Read this folder instead of HOLMES_SYSFS_ROOT or /sys.")
    ] = None,
) -> None:
    """Lists this host's NICs: class, speed, state, addresses, GID, PCI place and nearest GPUs."""
    root = None if sysfs_root is None else str(sysfs_root)
    found = discover_nics(root)
    if matrix:
        gpus, beside = discover_gpus(root), placed(found)
        words = affinity(gpus, beside)
        rows = [
            {**gpu, "nics": {nic.name: word for nic, word in zip(beside, row, strict=True)}}
            for gpu, row in zip(gpus, words, strict=True)
        ]
        show(json_file, rows, lambda: print_matrix(plain_console(), gpus, beside, words))
        return
    show(json_file, [nic.to_dict() for nic in found], lambda: print_nics(plain_console(), found))


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


def print_matrix(
    console: Console, gpus: Sequence[Mapping[str, Any]], found: Sequence[Nic], words: Sequence[Sequence[str]]
) -> None:
    """Rows of GPUs, columns of NICs; where their names take too much room, they are numbered and named below."""
    if not gpus or not found:
        console.print(f"{count(len(gpus), 'GPU')} and {count(len(found), 'NIC')} on this host's PCI bus: no matrix")
        return
    short = [nic.name for nic in found]
    lines = _matrix(gpus, short, words)
    if max(map(len, lines)) > console.width:
        short = [f"NIC{number}" for number in range(len(found))]
        lines = _matrix(gpus, short, words)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    console.print()
    if short[0] != found[0].name:
        named = [f"{one} {nic.name}" for one, nic in zip(short, found, strict=True)]
        console.print(textwrap.fill(", ".join(named), console.width), highlight=False)
    used = [word for word in MEANINGS if any(word in row for row in words)]
    for word in used:
        console.print(f"{word:<4} {MEANINGS[word]}", highlight=False)


def _matrix(gpus: Sequence[Mapping[str, Any]], names: Sequence[str], words: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(name), *(len(row[column]) for row in words)) for column, name in enumerate(names)]
    rows = [("GPU", "NUMA", names)]
    rows += [
        (_short_pci(gpu["pci_address"]), _or_dash(gpu["numa_node"]), row) for gpu, row in zip(gpus, words, strict=True)
    ]
    first = max(len(row[0]) for row in rows)
    return [
        f"{gpu:<{first}} {node:>4} " + " ".join(f"{word:<{w}}" for word, w in zip(cells, widths, strict=True)).rstrip()
        for gpu, node, cells in rows
    ]


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
