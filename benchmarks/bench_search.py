"""How long `holmes plan` searches, and in how much memory: `python benchmarks/bench_search.py`.

Hand-written topologies up to 16,384 GPUs in 8 clusters of 5 kinds. Each search runs in a process of its own, from
reading the topology to the plan. Writes results/search.json; exits with 1 where the largest takes 60 s or 2 GiB.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from holmes import files
from holmes.cluster.topology import Topology
from holmes.planning.model.presets import load_model
from holmes.planning.search import search
from holmes.tools.bench import tables

HERE = Path(__file__).parent
GOAL_S, GOAL_GIB = 60, 2
#: GPU, NIC class, Gbit/s of a NIC, NICs of a host
KINDS = [
    ("H100-80GB", "infiniband", 400, 8),
    ("H100-80GB", "roce_v2", 400, 8),
    ("A100-80GB", "infiniband", 200, 8),
    ("A100-80GB", "roce_v2", 200, 4),
    ("H200-141GB", "infiniband", 400, 8),
]
#: model, clusters, hosts of each, samples of a step
CASES = [
    ("gpt-7.5b", 2, 4, 1536),
    ("gpt3-175b", 3, 64, 1536),
    ("llama-3-70b", 4, 128, 2048),
    ("llama-3-405b", 8, 256, 4096),
]


def topology(clusters: int, hosts: int) -> dict:
    """Clusters of 8-GPU hosts, kinds in turn, joined by Ethernet."""
    entries = []
    for index in range(clusters):
        gpu, nic_class, gbps, nics = KINDS[index % len(KINDS)]
        rails = {"name": "n{}", "count": nics, "nic_class": nic_class, "subnet": f"c{index}-{{}}", "speed_gbps": gbps}
        common = {"name": "eth0", "nic_class": "ethernet", "subnet": "all", "speed_gbps": 100}
        entry = {"name": f"c{index}-{{}}", "count": hosts, "ranks_per_host": 8, "gpu": gpu, "ports": [rails, common]}
        entries.append(entry)
    return {"kind": "holmes topology", "version": 2, "hosts": entries}


def run(model: str, path: Path, global_batch: int) -> dict:
    """Searches and makes the plan in this process."""
    start_s = time.perf_counter()
    loaded = Topology.load(path)
    found = search(loaded, load_model(model), global_batch)
    searched_s = time.perf_counter()
    plan = found.plan()
    plan.save(path.with_name("plan.yaml"))
    best = found.best
    return {
        "model": model,
        "gpus": loaded.world_size,
        "clusters": len(loaded.clusters),
        "global_batch": global_batch,
        "seconds": time.perf_counter() - start_s,
        "plan_s": time.perf_counter() - searched_s,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "choices": found.tried,
        "simulated": len(found.candidates),
        "best": best.choice.text(),
        "layers_per_stage": best.layers_per_stage,
        "step_s": best.step_s,
        "tflops_per_gpu": best.tflops_per_gpu,
    }


def main() -> int:
    """Runs all cases; returns 0 where the largest meets the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "search.json")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # model, topology, batch: a process of its own
    arguments = parser.parse_args()
    if arguments.one:
        model, path, batch = arguments.one
        print(json.dumps(run(model, Path(path), int(batch))))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model, clusters, hosts, batch in CASES:
            path = Path(folder) / "topology.yaml"
            files.save(topology(clusters, hosts), path)
            command = [sys.executable, __file__, "--one", model, str(path), str(batch)]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows.append(row)
            print(
                f"{model:>13} on {row['gpus']:>6} GPUs in {clusters}: {row['seconds']:5.1f} s, "
                f"{row['peak_gib']:.2f} GiB, {row['choices']} choices; {row['best']}: step {row['step_s']:.4g} s",
                flush=True,
            )
    met = rows[-1]["seconds"] < GOAL_S and rows[-1]["peak_gib"] < GOAL_GIB
    goals = {"goal_s": GOAL_S, "goal_gib": GOAL_GIB}
    document = tables.facts("python benchmarks/bench_search.py", goals) | {"goal_met": met, "rows": rows}
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
