"""What rails give on the testbed's shaped links: two NICs against one, unequal NICs, a NIC lost on the way.

    python benchmarks/bench_rails.py                     # writes benchmarks/results/rails.json
    python benchmarks/bench_rails.py --only equal -b 64M # one case, one size

Cases: `equal` (1 + 1 Gbit/s), `unequal` (1 + 0.25), `streams` (one NIC, one and two streams), `unshaped` (both without
a rate limit: the cost of striping), `loss` (a NIC goes down during 100 operations). Two ranks; ratios are to the first
(fast) NIC alone. The selections take turns, so that both see the same machine; medians over all calls of the slower
rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rank_jobs import parse_or_work
from timed_call import timed_call

import holmes_comm

_SPEC = """description: two nodes with two NICs
networks:
  rail0: {{class: roce_v2, rate_gbps: {0}}}
  rail1: {{class: roce_v2, rate_gbps: {1}}}
  eth: {{class: ethernet, rate_gbps: 1}}
clusters:
  a:
    nodes: 2
    nics:
      - {{name: roce0, network: rail0, hca: mlx5_0}}
      - {{name: roce1, network: rail1, hca: mlx5_1}}
      - {{name: eth0, network: eth}}
"""
_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "send")
_CASES = {"equal": (1.0, 1.0), "unequal": (1.0, 0.25), "streams": (1.0, 1.0)}
_LOSS_OPERATIONS = 100
_LOSS_DEADLINE_S = 20.0
_KIB = {"K": 1 << 10, "M": 1 << 20}


def _size_bytes(text: str) -> int:
    return int(text[:-1]) * _KIB[text[-1]] if text[-1] in _KIB else int(text)


# --- a rank ---


def _compare(store: Any, rank: int, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of operation, size, seconds with the first and with the second selection."""
    comms = [
        holmes_comm.init(
            store, rank, 2, nics=holmes_comm.NicSelection(**selection), transport="tcp", name=f"c{i}", timeout_s=60.0
        )
        for i, selection in enumerate(job["selections"])
    ]
    rows = []
    for size_bytes in job["sizes"]:
        data, part = np.ones(size_bytes // 4, "float32"), np.ones(size_bytes // 8, "float32")
        for operation in job["operations"]:
            times_s: list[list[float]] = [[], []]
            for number in range(job["rounds"] + 1):
                data.fill(1)
                for times, comm in zip(times_s, comms, strict=True):
                    elapsed_s = timed_call(comm, operation, data, part)
                    slowest = np.array([elapsed_s])
                    comm.all_reduce(slowest, op="max")
                    if number > 0:  # the first warms up
                        times.append(float(slowest[0]))
                print("times", operation, [round(t * 1e3, 1) for t in times_s[1]], flush=True)
            one_s, two_s = map(statistics.median, times_s)
            rows.append({
                "operation": operation, "bytes": size_bytes, "one_s": one_s, "two_s": two_s, "ratio": one_s / two_s,
                "worst_ratio": one_s / max(times_s[1]),
            })  # fmt: skip
    for comm in comms:
        comm.barrier()
    return rows


def _lose(store: Any, rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """100 all-reduces; prints which one runs, so that the other side can take a NIC down."""
    comm = holmes_comm.init(
        store, rank, 2, nics=holmes_comm.NicSelection(**job["selections"][1]), transport="tcp", name="loss",
        timeout_s=_LOSS_DEADLINE_S,
    )  # fmt: skip
    count = job["sizes"][0] // 4
    times_s, wrong = [], 0
    for number in range(_LOSS_OPERATIONS):
        print(f"operation {number}", flush=True)
        data = np.arange(count, dtype="float32") % 1000 + rank + number
        start_s = time.perf_counter()
        comm.all_reduce(data)
        times_s.append(time.perf_counter() - start_s)
        wrong += int((data != 2 * (np.arange(count, dtype="float32") % 1000) + 1 + 2 * number).sum())
    retired = sorted({c["interface"] for c in comm.connections() if c["retired"]})
    comm.barrier()
    return {"median_s": statistics.median(times_s), "longest_s": max(times_s), "wrong": wrong, "retired": retired}


def _run_rank(job: dict[str, Any]) -> None:
    rank = int(os.environ["RANK"])
    store = holmes_comm.TcpStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_server=rank == 0)
    result = _lose(store, rank, job) if job["case"] == "loss" else _compare(store, rank, job)
    print("result " + json.dumps(result), flush=True)


# --- the testbed ---


def _run_case(job: dict[str, Any], rates_gbps: tuple[float, float]) -> Any:
    from holmes.lab.testbed import Testbed

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as spec:
        spec.write(_SPEC.format(*rates_gbps))
        spec.flush()
        testbed = Testbed(Path(spec.name))
    command = [sys.executable, __file__, "--rank", json.dumps(job)]
    with testbed.session() as session:
        launched = session.launch(command)
        if job["case"] == "loss":
            launched.processes[0].wait_for_line(f"operation {_LOSS_OPERATIONS // 3}", 120.0)
            session.set_link("a1", "roce1", up=False)
        outcome = launched.wait(900.0)
    if outcome.returncode != 0:
        raise SystemExit("\n".join(line for lines in outcome.outputs.values() for line in lines))
    results = [json.loads(line[7:]) for line in outcome.outputs[0] if line.startswith("result ")]
    if job["case"] == "loss":
        results[0]["warnings"] = [line for lines in outcome.outputs.values() for line in lines if " warn: " in line]
    return results[0]


def _machine() -> dict[str, Any]:
    model = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "unknown")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "processor": model.split(":")[-1].strip(),
        "cores": os.cpu_count(),
        "kernel": os.uname().release,
        "python": sys.version.split()[0],
        "commit": commit.stdout.strip(),
        "links": "emulated (token buckets on veth pairs)",
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/bench_rails.py " + " ".join(sys.argv[1:]),
    }


def main() -> None:
    """Runs the cases, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*_CASES, "loss", "unshaped"], action="append", help="this case only")
    parser.add_argument("-b", "--size", action="append", help="bytes, as 16M (default 16M and 64M)")
    parser.add_argument("-o", "--operation", action="append", choices=_OPERATIONS)
    parser.add_argument("--rounds", type=int, default=7, help="calls of each operation and selection")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results") / "rails.json")
    arguments = parse_or_work(parser, _run_rank)
    sizes = [_size_bytes(text) for text in arguments.size or ("16M", "64M")]
    one, two = {"names": ["roce0"]}, {"nic_class": "roce", "max_rails": 2}
    results: dict[str, Any] = {}
    for case in arguments.only or [*_CASES, "unshaped", "loss"]:
        second = {**one, "streams": 2} if case == "streams" else two
        job = {"case": case, "sizes": sizes, "rounds": arguments.rounds, "selections": [one, second],
               "operations": arguments.operation or _OPERATIONS}  # fmt: skip
        results[case] = _run_case(job, _CASES.get(case, (100.0, 100.0) if case == "unshaped" else (1.0, 1.0)))
        if case == "loss":
            print(f"loss: {json.dumps(results[case])}", flush=True)
            continue
        for row in results[case]:
            print(f"{case:9} {row['operation']:14} {row['bytes'] >> 20:4} MiB  one {row['one_s'] * 1e3:8.1f} ms  "
                  f"two {row['two_s'] * 1e3:8.1f} ms  ratio {row['ratio']:5.2f} (worst call {row['worst_ratio']:5.2f})",
                  flush=True)  # fmt: skip
    arguments.json.parent.mkdir(exist_ok=True)
    arguments.json.write_text(json.dumps({"machine": _machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
