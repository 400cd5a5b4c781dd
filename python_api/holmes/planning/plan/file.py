"""The plan's file, short enough to read at any number of ranks, since groups follow from order and networks; and the
plan in a few lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from holmes import files
from holmes.cluster.topology import Cluster
from holmes.planning.groups.group import Groups
from holmes.planning.groups.reach import HostRanks, Network
from holmes.words import from_text, short, to_text
from holmes_comm.errors import UsageError

if TYPE_CHECKING:
    from holmes.planning.plan.plan import Plan


KIND, VERSION = "holmes plan", 3
_SHORT = ("order", "hosts", "clusters", "networks")
_GROUPS_SHOWN = 16  # of one kind, one by one; of more, an example
_NAMES_SHOWN = 8  # of hosts, and of a group's NICs


def to_dict(plan: Plan) -> dict[str, Any]:
    """Plain lists, dicts, numbers and strings; ranks and host numbers as `words.to_text` writes them."""
    number = {host.name: i for i, host in enumerate(plan.hosts)}
    data: dict[str, Any] = {"kind": KIND, "version": VERSION}
    data |= {field.name: files.plain(getattr(plan, field.name)) for field in fields(plan) if field.name not in _SHORT}
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
    values = {key: value for key, value in data.items() if key not in ("kind", "version")}
    try:
        hosts = tuple(HostRanks(entry["name"], from_text(entry["ranks"])) for entry in data["hosts"])
        values["hosts"] = hosts
        values["order"] = from_text(data["order"])
        values["clusters"] = tuple(_cluster(entry, hosts) for entry in data["clusters"])
        values["networks"] = tuple(Network(**{**entry, "nics": _nics(entry, hosts)}) for entry in data["networks"])
        values["layers_per_chunk"] = tuple(tuple(layers) for layers in data["layers_per_chunk"])
        values["reasons"] = tuple(data.get("reasons", ()))
        return Plan(**values)
    except (KeyError, TypeError) as error:
        raise UsageError(f"not a plan: {error}") from error


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


def _nics(entry: Mapping[str, Any], hosts: Sequence[HostRanks]) -> dict[int, str]:
    nics = {host: name for name, text in entry["nics"].items() for host in from_text(text)}
    _check_hosts(f"network {entry['name']!r}", nics, hosts)
    return nics


def _cluster(entry: Mapping[str, Any], hosts: Sequence[HostRanks]) -> Cluster:
    numbers = from_text(entry["hosts"])
    _check_hosts(f"cluster {entry['name']!r}", numbers, hosts)
    members = [hosts[number] for number in numbers]
    ranks = tuple(rank for host in members for rank in host.ranks)
    return Cluster(**{**entry, "hosts": tuple(host.name for host in members), "ranks": ranks})


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
    if plan.expert > 1:
        lines.append(f"experts: expert {plan.expert} x tensor {plan.expert_tensor} x data {plan.expert_data}")
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
        lines.append(f"{group.kind} {short(group.ranks)}: {f'{nics}; ' if nics else ''}{group.reason}")
    if len(groups) > len(shown):
        lines[0] = f"{len(groups)} groups of kind {groups.kind}, such as {lines[0]}"
    return lines
