"""The plan's file, short enough to read at any number of ranks, since groups follow from order and networks; and the
plan in a few lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from holmes import files
from holmes.cluster.topology import Cluster
from holmes.cluster.topology.fields import Entry
from holmes.planning.groups.group import Groups
from holmes.planning.groups.reach import HostRanks, Network
from holmes.words import from_text, short, to_text
from holmes_comm.errors import UsageError

if TYPE_CHECKING:
    from holmes.planning.plan.plan import Plan


KIND, VERSION = "holmes plan", 3
_CLUSTER = ("name", "hosts", "fabric", "nic_class")
_NETWORK = ("name", "nic_class", "subnet", "rate_gbps", "nics", "is_child")
_SHORT = ("order", "hosts", "clusters", "networks")
_GROUPS_SHOWN = 16  # of one kind, one by one; of more, an example
_NAMES_SHOWN = 8  # of hosts, and of a group's NICs


def to_dict(plan: Plan) -> dict[str, Any]:
    """Plain lists, dicts, numbers and strings; ranks and host numbers as `words.to_text` writes them."""
    number = {host.name: i for i, host in enumerate(plan.hosts)}
    data: dict[str, Any] = {"kind": KIND, "version": VERSION}
    data |= {field.name: files.plain(getattr(plan, field.name)) for field in fields(plan) if field.name not in _SHORT}
    for name in ("warmup", "micro_batch_group", "turns", "data_shares"):  # which older releases do not know
        if data[name] is None:
            del data[name]
    data["order"] = to_text(plan.order)
    data["hosts"] = [{"name": host.name, "ranks": to_text(host.ranks)} for host in plan.hosts]
    data["clusters"] = [
        {
            "name": cluster.name,
            "hosts": to_text([number[name] for name in cluster.hosts]),
            "fabric": cluster.fabric,
            "nic_class": cluster.nic_class,
        }
        for cluster in plan.clusters
    ]
    data["networks"] = [{**files.plain(_without_nics(net)), "nics": _nics_to_text(net.nics)} for net in plan.networks]
    return data


def from_dict(data: Mapping[str, Any]) -> Plan:
    """The inverse of `to_dict`. Raises ValueError naming what is wrong."""
    from holmes.planning.plan.plan import Plan

    files.check_kind(data, KIND, version=VERSION)
    try:
        values = _read(Entry(data, "", ("kind", "version", *(field.name for field in fields(Plan)))))
    except (TypeError, ValueError) as error:
        raise UsageError(f"not a plan: {error}") from error
    return Plan(**values)


def _read(top: Entry) -> dict[str, Any]:
    from holmes.planning.plan.plan import SIZES

    values = {
        name: top.get(name) for name in ("recomputation", "micro_batch", "global_batch", "micro_batch_group", "turns")
    }
    values |= {name: top.whole(name, 0) for name in SIZES}
    values["schedule"] = top.text("schedule")
    values["model"] = {name: size for _, name, size in top.mapping("model")} if "model" in top else None
    values["reasons"] = tuple(line for _, line in top.items("reasons"))
    values["layers_per_chunk"] = tuple(
        _whole_numbers(where, layers, "the layers of each chunk, such as [8, 8]")
        for where, layers in top.items("layers_per_chunk", required=True)
    )
    if "warmup" in top:
        values["warmup"] = _whole_numbers("warmup", top.get("warmup"), "the forwards of each stage, such as [6, 4]")
    if "data_shares" in top:
        what = "the micro-batches of each replica, such as [6, 2]"
        values["data_shares"] = _whole_numbers("data_shares", top.get("data_shares"), what)
    values["order"] = _numbers(top, "order")
    hosts = tuple(_host(Entry(item, where, ("name", "ranks"))) for where, item in top.items("hosts", required=True))
    values["hosts"] = hosts
    values["clusters"] = tuple(_cluster(Entry(item, where, _CLUSTER), hosts) for where, item in top.items("clusters"))
    values["networks"] = tuple(_network(Entry(item, where, _NETWORK), hosts) for where, item in top.items("networks"))
    return values


def _numbers(entry: Entry, key: str) -> tuple[int, ...]:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise entry.wrong(key, "numbers such as 0-7,16-30:2")
    return from_text(value)


def _whole_numbers(where: str, numbers: Any, what: str) -> tuple[int, ...]:
    if not isinstance(numbers, list) or not all(type(count) is int and count >= 0 for count in numbers):
        raise UsageError(f"{where} is {numbers!r}; it must be a list with {what}")
    return tuple(numbers)


def _host(entry: Entry) -> HostRanks:
    return HostRanks(entry.text("name"), _numbers(entry, "ranks"))


def _without_nics(network: Network) -> dict[str, Any]:
    entry = {field.name: getattr(network, field.name) for field in fields(network) if field.name != "nics"}
    if not network.is_child:
        del entry["is_child"]
    return entry


def _nics_to_text(nics: Mapping[int, str]) -> dict[str, str]:
    hosts: dict[str, list[int]] = {}
    for host, name in nics.items():
        hosts.setdefault(name, []).append(host)
    return {name: to_text(numbers) for name, numbers in hosts.items()}


def _network(entry: Entry, hosts: Sequence[HostRanks]) -> Network:
    name = entry.text("name")
    nics = {host: str(nic) for _, nic, text in entry.mapping("nics") for host in from_text(text)}
    _check_hosts(f"network {name!r}", nics, hosts)
    return Network(
        name, entry.text("nic_class"), entry.text("subnet"), entry.positive("rate_gbps"), nics, entry.flag("is_child")
    )


def _cluster(entry: Entry, hosts: Sequence[HostRanks]) -> Cluster:
    name, numbers = entry.text("name"), _numbers(entry, "hosts")
    _check_hosts(f"cluster {name!r}", numbers, hosts)
    members = [hosts[number] for number in numbers]
    ranks = tuple(rank for host in members for rank in host.ranks)
    fabric, nic_class = entry.optional_text("fabric"), entry.optional_text("nic_class")
    return Cluster(name, tuple(host.name for host in members), ranks, fabric, nic_class)


def _check_hosts(what: str, numbers: Any, hosts: Sequence[HostRanks]) -> None:
    unknown = [number for number in numbers if number >= len(hosts)]
    if unknown:
        raise UsageError(f"{what} names host {unknown[0]}, but the plan has hosts 0 to {len(hosts) - 1}")


def describe(plan: Plan) -> str:
    """Sizes, clusters, and the groups' ranks, NICs and reasons; many equal ones as an example."""
    sizes = {"tensor": plan.tensor, "context": plan.context, "data": plan.data, "pipeline": plan.pipeline}
    kept = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name != "context"]
    layers = files.plain(plan.layers_per_stage if plan.chunks == 1 else plan.layers_per_chunk)
    lines = [f"{plan.world_size} ranks = {' x '.join(kept)}, layers per stage {layers}, schedule {plan.schedule}"]
    if plan.data_shares is not None:
        lines[0] += f", micro-batches of each replica {short(plan.data_shares)}"
    if plan.warmup is not None:
        lines.append(f"forwards of each stage before its first backward: {list(plan.warmup)}")
    if plan.expert > 1:
        lines.append(f"experts: expert {plan.expert} x tensor {plan.expert_tensor} x data {plan.expert_data}")
    if plan.micro_batch_group is not None:
        lines.append(f"micro-batches through a chunk before the next one: {plan.micro_batch_group}")
    if plan.turns is not None:
        lines.append(f"pipelines that take turns on what joins the clusters: {plan.turns}")
    if plan.global_batch is not None:
        lines.append(f"global batch {plan.global_batch}, micro-batch {plan.micro_batch or 'not given'}")
    if plan.recomputation is not None:
        lines.append(f"recomputation {plan.recomputation}")
    for cluster in plan.clusters:
        more = f", ... {len(cluster.hosts)} in all" if len(cluster.hosts) > _NAMES_SHOWN else ""
        hosts = ", ".join(cluster.hosts[:_NAMES_SHOWN]) + more
        lines.append(f"{cluster.name}: hosts {hosts}; ranks {to_text(cluster.ranks)}; {cluster.fabric}")
    for kind in ("tp", "cp", "dp", "pp", "ep", "expt_dp"):
        if plan.grid.size_of(kind) > 1 and (plan.expert > 1 or kind not in ("ep", "expt_dp")):
            lines += _groups(plan.groups(kind))
    return "\n".join([*lines, *plan.reasons])


def _groups(groups: Groups) -> list[str]:
    shown = groups if len(groups) <= _GROUPS_SHOWN else groups[:1]
    lines = []
    for group in shown:
        nics = ", ".join(f"{rank}: {'+'.join(names)}" for rank, names in list(group.nics.items())[:_NAMES_SHOWN])
        first = "" if group.priority is None else f"; priority {group.priority}"
        first += "" if group.turn is None else f", turn {group.turn}"
        lines.append(f"{group.kind} {short(group.ranks)}: {f'{nics}; ' if nics else ''}{group.reason}{first}")
    if len(groups) > len(shown):
        lines[0] = f"{len(groups)} groups of kind {groups.kind}, such as {lines[0]}"
    return lines
