"""Topologies for tests: hosts of any number of ranks, in clusters of any size, ranks launched in any order."""

from __future__ import annotations

import random
from collections.abc import Sequence

from holmes.cluster.topology import Host, NodeInventory, Port, Topology, candidate_fabrics, make_topology, merge_hosts

CLASSES = ("infiniband", "roce_v2", "roce_v1")


def ports_of(cluster: int, host: int, rails: int = 1, fast_gbps: float = 200.0) -> tuple[Port, ...]:
    """`rails` fast NICs in subnets of the cluster's own, whose names differ per cluster, and an Ethernet that all
    share."""
    fast = tuple(
        Port(f"nic{cluster}_{rail}", CLASSES[cluster % 3], f"10.{10 * cluster + rail}.{host // 250}.{host % 250 + 1}",
             f"10.{10 * cluster + rail}.0.0/16", fast_gbps)
        for rail in range(rails)
    )  # fmt: skip
    shared = Port("eth0", "ethernet", f"172.16.{host // 250}.{host % 250 + 1}", "172.16.0.0/12", 25.0)
    return (*fast, shared)


def topology_of(
    ranks_of_hosts: Sequence[Sequence[int]], shuffle: random.Random | None = None, rails: int = 1
) -> Topology:
    """`ranks_of_hosts[c]`: the number of ranks of each host of cluster c. Every cluster needs two hosts, to be one."""
    hosts = [(cluster, host) for cluster, counts in enumerate(ranks_of_hosts) for host in range(len(counts))]
    places = [place for place in hosts for _ in range(ranks_of_hosts[place[0]][place[1]])]
    if shuffle is not None:
        shuffle.shuffle(places)
    number = {place: i for i, place in enumerate(hosts)}
    inventories = [
        NodeInventory(rank, f"c{place[0]}h{place[1]}", f"id{number[place]}", ports_of(place[0], number[place], rails))
        for rank, place in enumerate(places)
    ]
    merged = merge_hosts(inventories)
    return make_topology(merged, candidate_fabrics(merged))


def port(nic_class: str, address: str, speed_gbps: float = 200.0, name: str = "", gateway: bool = False) -> Port:
    subnet = address.rsplit(".", 1)[0] + ".0/24"
    return Port(name or {"infiniband": "ib0", "roce_v2": "roce0"}.get(nic_class, "eth0"), nic_class, address, subnet,
                speed_gbps, gateway)  # fmt: skip


def hosts_of(*ports_by_host: list[Port], ranks_per_host: int = 1) -> tuple[Host, ...]:
    return merge_hosts(
        [
            NodeInventory(host * ranks_per_host + local, f"n{host}", f"id{host}", tuple(ports))
            for host, ports in enumerate(ports_by_host)
            for local in range(ranks_per_host)
        ]
    )


def ib(host: int) -> list[Port]:
    return [port("infiniband", f"10.1.0.{host}"), port("ethernet", f"10.9.0.{host}", 25)]


def roce(host: int) -> list[Port]:
    return [port("roce_v2", f"10.2.0.{host}"), port("ethernet", f"10.9.0.{host}", 25)]


def assumed(hosts: tuple[Host, ...]) -> Topology:
    return make_topology(hosts, candidate_fabrics(hosts))


def two_clusters(ranks_per_host: int = 1) -> Topology:
    return assumed(hosts_of(ib(1), ib(2), roce(3), roce(4), ranks_per_host=ranks_per_host))
