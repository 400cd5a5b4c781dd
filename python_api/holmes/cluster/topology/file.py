"""The topology's file, version 2: what `holmes topology --save` writes, and what a person writes by hand.

A hand-written file may use templates (`count`, "{}" in names), leave out addresses and fabrics,
and give rates of fabrics that follow from the NICs; docs/topology.md shows it.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holmes import files
from holmes.cluster.topology.fabrics import candidate_fabrics, make_fabric
from holmes.cluster.topology.fields import Entry, numbered
from holmes.cluster.topology.parts import NIC_CLASSES, Fabric, Host, Link, Pair, Port, TopologyFinding
from holmes.cluster.topology.topology import Topology, make_topology
from holmes_comm.errors import UsageError

KIND, VERSION = "holmes topology", 2
_TOP = ("kind", "version", "hosts", "fabrics", "findings", "links", "pairs")
_GPU = ("gpu", "gpu_memory_gib", "gpu_tflops")
_MOST = 1_000_000  # ranks of one entry: more is a slip of the pen, and would fill the memory
_MOST_NICS = 1024
_HOST = ("name", "host_id", "ranks", "ports", *_GPU, "count", "ranks_per_host")
_PORT = ("name", "nic_class", "address", "subnet", "speed_gbps", "has_gateway", "parent", "count")
_RATES = ("measured_gbps", "measured_min_gbps", "latency_s", "jitter_s")
_FABRIC = ("name", "nic_class", "subnet", "speed_gbps", "ports", "confirmed", *_RATES, "host_limited")
_FINDING = tuple(field.name for field in dataclasses.fields(TopologyFinding))
_LINK = tuple(field.name for field in dataclasses.fields(Link))
_PAIR = tuple(field.name for field in dataclasses.fields(Pair))


def to_dict(topology: Topology) -> dict[str, Any]:
    """Plain lists, dicts, numbers and strings; hosts by name, and without the fields that are unknown.

    Hosts alike in a row become a template again, and fabrics that follow from the NICs are left out.
    """
    names = {host.host_id: host.name for host in topology.hosts}
    hosts = []
    for template, run in runs(topology.hosts):
        host = run[0]
        entry = _known({**files.plain(host), "ports": [_known(files.plain(port)) for port in host.ports]})
        if host.host_id == host.name:
            del entry["host_id"]
        if len(run) > 1:
            del entry["ranks"]
            entry = {"count": len(run), **entry, "name": template, "ranks_per_host": len(host.ranks)}
        hosts.append(entry)
    rest = {key: files.plain(getattr(topology, key)) for key in ("findings", "links", "pairs")}
    rest["links"] = [_known(link) for link in rest["links"]]
    fabrics = {} if _follow(topology) else {"fabrics": [_plain_fabric(f, names) for f in topology.fabrics]}
    return {"kind": KIND, "version": VERSION, "hosts": hosts, **fabrics, **_known(rest)}


def from_dict(data: Mapping[str, Any]) -> Topology:
    """The inverse of `to_dict`. Raises ValueError naming the field, its value, the rule and the fix."""
    files.check_kind(data, KIND, version=VERSION)
    top = Entry(data, "", _TOP)
    hosts: list[Host] = []
    next_rank = 0
    for where, item in top.items("hosts", required=True):
        hosts += _hosts(Entry(item, where, _HOST), next_rank)
        next_rank = max(next_rank, hosts[-1].ranks[-1] + 1)
    _check_hosts(hosts)
    fabrics = list(candidate_fabrics(hosts)) if _derives_fabrics(top) else []
    by_name = {name: host for host in hosts for name in (host.host_id, host.name)}
    for where, item in top.items("fabrics"):
        entry = Entry(item, where, _FABRIC)
        if "ports" in entry:
            fabrics.append(_fabric(entry, by_name))
        else:
            _amend(fabrics, entry)
    _unique([fabric.name for fabric in fabrics], "fabrics", "name")
    findings = [_finding(Entry(item, where, _FINDING)) for where, item in top.items("findings")]
    links = [_link(Entry(item, where, _LINK)) for where, item in top.items("links")]
    pairs = [_pair(Entry(item, where, _PAIR), by_name) for where, item in top.items("pairs")]
    return make_topology(hosts, fabrics, findings, links, pairs)


def _follow(topology: Topology) -> bool:
    """Whether the fabrics are just those that the NICs suggest."""
    return bool(topology.fabrics) and topology.fabrics == candidate_fabrics(topology.hosts)


def _plain_fabric(fabric: Fabric, names: Mapping[str, str]) -> dict[str, Any]:
    ports = {names[host_id]: nic for host_id, nic in fabric.ports.items()}
    return _known({**files.plain(fabric), "ports": ports})


def _hosts(entry: Entry, first_rank: int) -> list[Host]:
    """The hosts of one entry; those without explicit ranks go on at `first_rank`."""
    count = entry.whole("count", 1, most=_MOST)
    ranks = _ranks(entry, count)
    per_host = entry.whole("ranks_per_host", 1, most=_MOST // count)
    place, template = f"{entry.where}.name", entry.text("name")
    ports = tuple(port for where, item in entry.items("ports") for port in _ports(Entry(item, where, _PORT)))
    _unique([port.name for port in ports], f"{entry.where}.ports", "name")
    hosts = []
    for index in range(count):
        name = numbered(template, index, count, place) if "count" in entry else template
        start = first_rank + index * per_host
        hosts.append(
            Host(
                name=name,
                host_id=entry.text("host_id", name),
                ranks=ranks or tuple(range(start, start + per_host)),
                ports=ports,
                gpu=entry.optional_text("gpu"),
                gpu_memory_gib=entry.positive("gpu_memory_gib"),
                gpu_tflops=entry.positive("gpu_tflops"),
            )
        )
    return hosts


def _ranks(entry: Entry, count: int) -> tuple[int, ...]:
    """The ranks as listed, ascending; empty where they are only counted."""
    if "ranks" not in entry:
        return ()
    for other in ("count", "ranks_per_host"):
        if other in entry:
            raise UsageError(f"{entry.where} has ranks and {other}; list the ranks, or count them with ranks_per_host")
    ranks = [rank for _, rank in entry.items("ranks", required=True)]
    if any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in ranks):
        raise entry.wrong("ranks", "a list of whole numbers of 0 or more")
    return tuple(sorted(ranks))


def _ports(entry: Entry) -> list[Port]:
    count = entry.whole("count", 1, most=_MOST_NICS)
    nic_class = entry.choice("nic_class", NIC_CLASSES)
    place = (nic_class, entry.text("address", ""))
    speed, gateway = entry.positive("speed_gbps"), entry.flag("has_gateway")
    name, subnet, parent = entry.text("name"), entry.text("subnet"), entry.text("parent", "")
    if "count" not in entry:
        return [Port(name, *place, subnet, speed, gateway, parent)]
    if count > 1 and place[1]:
        raise UsageError(f"{entry.where} has count: {count} and an address; leave the address out")
    where = entry.where
    return [
        Port(
            numbered(name, i, count, f"{where}.name"),
            *place,
            # Rails are wires of their own, "ib-rail{}"; a plain name is one wire with all of them on it.
            numbered(subnet, i, 1, f"{where}.subnet"),
            speed,
            gateway,
            parent,
        )
        for i in range(count)
    ]


def _check_hosts(hosts: Sequence[Host]) -> None:
    _unique([host.name for host in hosts], "hosts", "name")
    _unique([host.host_id for host in hosts], "hosts", "host_id")
    of_rank: dict[int, str] = {}
    for host in hosts:
        for rank in host.ranks:
            if rank in of_rank:
                raise UsageError(f"rank {rank} is on hosts {of_rank[rank]} and {host.name}; give it to one of them")
            of_rank[rank] = host.name
    missing = next((rank for rank in range(len(of_rank)) if rank not in of_rank), None)
    if missing is not None:
        count = len(of_rank)
        raise UsageError(f"the hosts have {count} ranks, but none has rank {missing}; they must be 0 to {count - 1}")


def _derives_fabrics(top: Entry) -> bool:
    """Whether the file leaves the fabrics to the NICs: it has no list of them, or one of rates only."""
    listed = [item for _, item in top.items("fabrics")]
    only_rates = all(isinstance(item, Mapping) and item.get("ports") is None for item in listed)
    return "fabrics" not in top or (bool(listed) and only_rates)


def _fabric(entry: Entry, hosts: Mapping[str, Host]) -> Fabric:
    named = entry.get("ports")
    if not isinstance(named, Mapping) or len(named) < 2:
        raise entry.wrong("ports", "a mapping of two or more hosts to the name of their NIC")
    ports = {}
    for host_name, nic in named.items():
        host = hosts.get(str(host_name))
        where = f"{entry.where}.ports"
        if host is None:
            raise UsageError(
                f"{where} names host {host_name!r}, which is not in hosts{_nearest(str(host_name), hosts)}"
            )
        port = next((port for port in host.ports if port.name == str(nic)), None)
        if port is None:
            have = ", ".join(port.name for port in host.ports) or "none"
            raise UsageError(f"{where}.{host_name} is {nic!r}, but host {host.name} has no such NIC; it has {have}")
        ports[host.host_id] = port
    nic_class, subnet = entry.choice("nic_class", NIC_CLASSES), entry.text("subnet")
    name = entry.text("name", f"{nic_class} {subnet}")
    fabric = make_fabric(name, nic_class, subnet, ports, confirmed=entry.flag("confirmed"))
    return dataclasses.replace(fabric, **_measured(entry), speed_gbps=entry.positive("speed_gbps"))


def _amend(fabrics: list[Fabric], entry: Entry) -> None:
    """Gives rates to a fabric that follows from the NICs, found by its name."""
    name = entry.text("name", "") or f"{entry.text('nic_class')} {entry.text('subnet')}"
    for key in ("host_limited", "confirmed"):
        if key in entry:
            raise UsageError(
                f"{entry.where}.{key} needs ports, the hosts and NICs it holds for; add them or leave it out"
            )
    for index, fabric in enumerate(fabrics):
        if fabric.name == name:
            changes = {key: value for key, value in _measured(entry).items() if value is not None}
            if "speed_gbps" in entry:
                changes["speed_gbps"] = entry.positive("speed_gbps")
            fabrics[index] = dataclasses.replace(fabric, **changes)
            return
    known = ", ".join(fabric.name for fabric in fabrics) or "none"
    raise UsageError(
        f"{entry.where} has no ports and names {name!r}, which does not follow from the hosts' NICs "
        f"(those that do: {known}); use one of these names, or list ports"
    )


def _measured(entry: Entry) -> dict[str, Any]:
    return {**{key: entry.positive(key) for key in _RATES}, "host_limited": entry.flag("host_limited")}


def _finding(entry: Entry) -> TopologyFinding:
    return TopologyFinding(*(entry.text(key) for key in _FINDING))


def _link(entry: Entry) -> Link:
    rates = _rates(entry, "gbps", "latency_s", "aggregate_gbps")
    names, jitter_s = _two(entry, "clusters"), entry.positive("jitter_s")
    return Link(names, entry.text("fabric"), pairs=entry.whole("pairs", 1), jitter_s=jitter_s, **rates)


def _pair(entry: Entry, hosts: Mapping[str, Host]) -> Pair:
    pair = Pair(_two(entry, "hosts"), _two(entry, "nics"), **_rates(entry, "gbps", "latency_s"))
    for name, nic in zip(pair.hosts, pair.nics, strict=True):
        if name not in hosts:
            raise UsageError(f"{entry.where} names host {name!r}, which is not in hosts{_nearest(name, hosts)}")
        if all(port.name != nic for port in hosts[name].ports):
            have = ", ".join(port.name for port in hosts[name].ports) or "none"
            raise UsageError(f"{entry.where} names NIC {nic!r}, but host {name} has no such NIC; it has {have}")
    return pair


def _two(entry: Entry, key: str) -> tuple[str, str]:
    names = [str(name) for _, name in entry.items(key, required=True)]
    if len(names) != 2:
        raise entry.wrong(key, f"a list of two {key}' names")
    return names[0], names[1]


def _rates(entry: Entry, *keys: str) -> dict[str, float]:
    rates = {}
    for key in keys:
        value = entry.positive(key)
        if value is None:
            raise entry.wrong(key, "a number above 0")
        rates[key] = value
    return rates


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is unknown, false or empty; an empty address, too, is one that is left out."""
    return {
        key: value
        for key, value in fields.items()
        if value is not None and value is not False and value not in ("", [])
    }


def _nearest(name: str, names: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, list(names)[:1000], n=1)
    return f"; the nearest name is {close[0]!r}" if close else ""


def _unique(names: Sequence[str], where: str, what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"{where}: {what} {name!r} is used twice; give each its own")
        seen.add(name)


_NUMBERED = re.compile(r"(.*?)(\d+)")


def runs(hosts: Sequence[Host]) -> Iterator[tuple[str, list[Host]]]:
    """The hosts in runs, each with the template of its names ("a{:03}"); runs of one host have their plain name.

    A run begins with number 0, its hosts are alike, without addresses, and their ranks are numbered on, also from the
    highest rank before the run: what reading such a template makes.
    """
    next_rank, start = 0, 0
    while start < len(hosts):
        end, template = start + 1, hosts[start].name
        pattern = _template(hosts[start])
        if pattern is not None and hosts[start].ranks[0] == next_rank:
            while end < len(hosts) and _goes_on(hosts[start], hosts[end], end - start, pattern):
                end += 1
            template = pattern if end > start + 1 else template
        yield template, list(hosts[start:end])
        next_rank = max(next_rank, hosts[end - 1].ranks[-1] + 1)
        start = end


def _template(host: Host) -> str | None:
    """The template that makes this host's name with number 0; None where the host cannot begin a run."""
    found = _NUMBERED.fullmatch(host.name)
    apart = host.host_id != host.name or any(port.address for port in host.ports)
    if apart or found is None or int(found[2]) != 0 or set(found[1]) & set("{}"):
        return None
    width = len(found[2])
    return found[1] + ("{}" if width == 1 else f"{{:0{width}}}")


def _goes_on(first: Host, host: Host, number: int, pattern: str) -> bool:
    per_host = len(first.ranks)
    start = first.ranks[0] + number * per_host
    return (
        host.name == host.host_id == pattern.format(number)
        and host.ranks == tuple(range(start, start + per_host))
        and (host.ports, host.gpu, host.gpu_memory_gib, host.gpu_tflops)
        == (first.ports, first.gpu, first.gpu_memory_gib, first.gpu_tflops)
    )
