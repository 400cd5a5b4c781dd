"""Planning at scale: time and memory of a topology's plan, all its groups, its file and its proof.

python benchmarks/bench_plan.py                  # about 100,000 ranks in 8 clusters; writes results/plan.json
python benchmarks/bench_plan.py --ranks 16384    # prints only
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holmes
from holmes.cluster.topology import Host, Port, Topology, candidate_fabrics, make_topology
from holmes.tools.bench import tables

CLUSTERS, RANKS_PER_HOST, RAILS = 8, 8, 8
DEFAULT_RANKS = 102_400
SIZES = {"tensor": 8, "context": 2, "pipeline": 16, "expert": 8, "expert_tensor": 1}


def machines(ranks: int, shuffled: bool) -> Topology:
    """Clusters of equal size, RDMA classes alternating, with a rail for each rank of a host and an Ethernet for all."""
    per_cluster = ranks // RANKS_PER_HOST // CLUSTERS
    count = per_cluster * CLUSTERS
    places = [host for host in range(count) for _ in range(RANKS_PER_HOST)]
    if shuffled:
        random.Random(0).shuffle(places)
    ranks_of: list[list[int]] = [[] for _ in range(count)]
    for rank, host in enumerate(places):
        ranks_of[host].append(rank)
    hosts = []
    for number in range(count):
        cluster, last = number // per_cluster, f"{number // 250 % 250}.{number % 250 + 1}"
        net = cluster * RAILS
        nic_class = ("infiniband", "roce_v2")[cluster % 2]
        rails = tuple(
            Port(f"mlx5_{rail}", nic_class, f"10.{net + rail}.{last}", f"10.{net + rail}.0.0/16", 200.0)
            for rail in range(RAILS)
        )
        shared = Port("eth0", "ethernet", f"172.16.{last}", "172.16.0.0/12", 25.0)
        hosts.append(Host(f"host{number}", str(number), tuple(ranks_of[number]), (*rails, shared)))
    return make_topology(hosts, candidate_fabrics(hosts))


def timed(rows: list[dict[str, Any]], name: str, action: Callable[[], Any]) -> Any:
    start_s = time.perf_counter()
    result = action()
    rows.append({"step": name, "time_s": round(time.perf_counter() - start_s, 3)})
    return result


def measure(ranks: int, shuffled: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    topology = timed(rows, "topology from its hosts", lambda: machines(ranks, shuffled))
    plan = timed(rows, "plan", lambda: holmes.plan_for(topology, model_layers=96, **SIZES))
    groups = timed(
        rows, "every group of every kind", lambda: [group for kind in holmes.KINDS for group in plan.groups(kind)]
    )
    rows[-1]["groups"] = len(groups)
    proof = timed(rows, "proof", lambda: holmes.check(plan, topology))
    assert proof.holds, proof.describe()
    timed(rows, "stage and data-parallel group of every 100th rank", lambda: [
        (plan.stage_of(rank), plan.group_of("dp", rank)) for rank in range(0, plan.world_size, 100)
    ])  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for suffix in ("json", "yaml"):
            path = Path(folder) / f"plan.{suffix}"
            timed(rows, f"save .{suffix}", lambda path=path: plan.save(path))
            rows[-1]["file_bytes"] = path.stat().st_size
            assert timed(rows, f"load .{suffix}", lambda path=path: holmes.Plan.load(path)) == plan
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=DEFAULT_RANKS, help=f"default {DEFAULT_RANKS}")
    arguments = parser.parse_args()
    results = {}
    for order, shuffled in (("host by host", False), ("launched in random order", True)):
        results[order] = measure(arguments.ranks, shuffled)
        print(f"{arguments.ranks} ranks, {order}:")
        for row in results[order]:
            more = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("step", "time_s"))
            print(f"  {row['step']:50} {row['time_s']:8.3f} s  {more}")
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"peak memory {peak_bytes / 2**20:.0f} MiB")
    if arguments.ranks == DEFAULT_RANKS:
        settings = {"ranks": arguments.ranks, "clusters": CLUSTERS, "rails": RAILS, **SIZES}
        document = tables.document("python benchmarks/bench_plan.py", settings, arguments.ranks, {}, [])
        document |= {"results": results, "peak_memory_bytes": peak_bytes}
        (Path(__file__).parent / "results" / "plan.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
