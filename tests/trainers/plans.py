"""Plans for the trainers' tests: two clusters, ranks scattered over their hosts, and a job without any network."""

import contextlib
import random

from holmes.cluster.topology import NodeInventory, Port, Topology, candidate_fabrics, make_topology, merge_hosts
from holmes.planning.plan import Plan, plan_for

NETWORKS = {"infiniband": ("ib0", "10.1.0"), "roce_v2": ("roce0", "10.2.0"), "ethernet": ("eth0", "10.9.0")}


def two_clusters(hosts: int = 4, ranks_per_host: int = 2, seed: int | None = 3) -> Topology:
    """The first half of the hosts has InfiniBand, the other RoCE; `seed` scatters ranks over hosts, None does not."""
    ranks = list(range(hosts * ranks_per_host))
    if seed is not None:
        random.Random(seed).shuffle(ranks)
    inventories = []
    for host in range(hosts):
        fast = "infiniband" if host < hosts // 2 else "roce_v2"
        ports = []
        for nic_class, speed_gbps in ((fast, 200.0), ("ethernet", 25.0)):
            name, subnet = NETWORKS[nic_class]
            ports.append(Port(name, nic_class, f"{subnet}.{host + 1}", f"{subnet}.0/24", speed_gbps))
        inventories += [
            NodeInventory(rank, f"n{host}", f"id{host}", tuple(ports))
            for rank in ranks[host * ranks_per_host : (host + 1) * ranks_per_host]
        ]
    merged = merge_hosts(inventories)
    return make_topology(merged, candidate_fabrics(merged))


def make(hosts: int = 4, ranks_per_host: int = 2, seed: int | None = 3, **sizes) -> Plan:
    return plan_for(two_clusters(hosts, ranks_per_host, seed), **{"model_layers": 7, **sizes})


@contextlib.contextmanager
def fake_job(rank: int, size: int):
    """torch.distributed as rank `rank` of `size` sees it, in one process: groups are made, nothing is communicated."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
