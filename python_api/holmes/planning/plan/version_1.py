"""Reading plans of version 1, which listed their groups: as much of hosts and networks as those groups tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holmes.planning.groups.rank_text import to_text


def upgrade(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same plan as version 2. Hosts are the ranks that version 1 put on shared memory together; networks are what
    it chose, so NICs of its groups are kept and those of others that it did not list may be missing.

    Raises ValueError naming what is wrong.
    """
    try:
        groups = data["groups"]
        by_kind = {kind: [group["ranks"] for group in groups if group["kind"] == kind] for kind in ("tp", "dp", "pp")}
        hosts = _joined(range(data["world_size"]), [group["ranks"] for group in groups if not group["nics"]])
        host_of = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
        return {
            "kind": data["kind"],
            "version": 2,
            **{key: data[key] for key in ("world_size", "tensor", "data", "pipeline")},
            "context": 1,
            "expert": 1,
            "expert_tensor": data["tensor"],
            "layers_per_chunk": [[count] for count in data["layers_per_stage"]],
            "schedule": "1f1b",
            "order": to_text(_order(by_kind)),
            "hosts": [{"name": f"host of rank {ranks[0]}", "ranks": to_text(ranks)} for ranks in hosts],
            "clusters": [
                {
                    "name": cluster["name"],
                    "hosts": to_text(sorted({host_of[rank] for rank in cluster["ranks"]})),
                    "fabric": cluster["fabric"],
                    "nic_class": cluster["nic_class"],
                }
                for cluster in data["clusters"]
            ],
            "networks": _networks(groups, host_of),
            "reasons": [],
        }
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not a plan of version 1: {error!r}") from error


def _order(by_kind: Mapping[str, Sequence[Sequence[int]]]) -> list[int]:
    """Tensor fastest, then data, then pipeline, from one group of each kind for every rank."""
    tensor = {ranks[0]: ranks for ranks in by_kind["tp"]}
    stage = {rank: number for ranks in by_kind["pp"] for number, rank in enumerate(ranks)}
    first = [ranks for ranks in by_kind["dp"] if ranks[0] in tensor]  # those of tensor rank 0
    first.sort(key=lambda ranks: stage[ranks[0]])
    return [rank for ranks in first for member in ranks for rank in tensor[member]]


def _networks(groups: Iterable[Mapping[str, Any]], host_of: Mapping[int, int]) -> list[dict[str, Any]]:
    """Groups with a host, a class and a number of rails in common were on one network; each rail becomes one."""
    alike: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for group in groups:
        if group["nics"]:
            rails = len(next(iter(group["nics"].values())))
            alike.setdefault((group["nic_class"], rails), []).append(group)
    found: list[tuple[bool, int, str, int, dict[str, str]]] = []
    for (nic_class, rails), mine in alike.items():
        nics = {host_of[int(rank)]: names for group in mine for rank, names in group["nics"].items()}
        for hosts in _joined(nics, [[host_of[rank] for rank in group["ranks"]] for group in mine]):
            for rail in range(rails):
                named: dict[str, list[int]] = {}
                for host in hosts:
                    named.setdefault(nics[host][rail], []).append(host)
                texts = {name: to_text(numbers) for name, numbers in named.items()}
                found.append((nic_class == "ethernet", len(hosts), nic_class, rail, texts))
    found.sort(key=lambda item: item[:2])  # best first: within what joins few hosts, it was preferred
    return [
        {
            "name": f"{nic_class} {number}",
            "nic_class": nic_class,
            "subnet": f"network {number} of a version 1 plan",
            "rate_gbps": None,
            "nics": texts,
        }
        for number, (_, _, nic_class, _, texts) in enumerate(found)
    ]


def _joined(members: Iterable[int], groups: Iterable[Sequence[int]]) -> list[list[int]]:
    """Members that are in one group with each other, directly or through others; ascending."""
    root = {member: member for member in members}

    def find(member: int) -> int:
        while root[member] != member:
            root[member] = root[root[member]]
            member = root[member]
        return member

    for group in groups:
        for member in group[1:]:
            low, high = sorted((find(group[0]), find(member)))
            root[high] = low
    found: dict[int, list[int]] = {}
    for member in root:
        found.setdefault(find(member), []).append(member)
    return [sorted(listed) for listed in sorted(found.values(), key=min)]
