"""Collectives of arrays of `holmes_comm.empty` against ordinary ones, in turns, between ranks of this host.

python benchmarks/bench_shared.py                   # 2 and 4 ranks, 1 to 64 MiB; writes results/shared.json
python benchmarks/bench_shared.py --ranks 2 --mib 16 --rounds 9 --operation all_reduce
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rank_jobs import parse_or_work

import holmes_comm

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
KINDS = ("ordinary", "shared")
WARM_UP_CALLS = 30  # ranks try each way of copying in them
ROUND_S = 0.04  # of one kind, about


def array_of(kind: str, count: int) -> np.ndarray[Any, Any]:
    """Of float32 ones."""
    array = holmes_comm.empty(count, np.float32) if kind == "shared" else np.empty(count, np.float32)
    array.fill(1)
    return array


def call_of(comm: Any, operation: str, kind: str, size_bytes: int) -> Callable[[], None]:
    """The call to time; it keeps its arrays. Raises AssertionError where the first gives a wrong result."""
    whole = array_of(kind, size_bytes // 4)
    part = array_of(kind, whole.size // comm.size)
    calls: dict[str, Callable[[], None]] = {
        "all_reduce": lambda: comm.all_reduce(whole),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole),
        "all_gather": lambda: comm.all_gather(whole, part),
        "broadcast": lambda: comm.broadcast(whole, src=0),
    }
    call = calls[operation]
    call()
    assert (whole == (comm.size if operation == "all_reduce" else 1)).all()
    assert (part == (comm.size if operation == "reduce_scatter" else 1)).all()
    whole.fill(0)  # which sums leave as it is
    return call


def time_all(comm: Any, case: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of a call, of every round: of the slowest rank."""
    calls = {kind: call_of(comm, case["operation"], kind, case["size_bytes"]) for kind in KINDS}
    start = time.perf_counter()
    for call in calls.values():
        for _ in range(WARM_UP_CALLS):
            call()
    repeats = np.array([max(1, int(ROUND_S / ((time.perf_counter() - start) / WARM_UP_CALLS / 2)))])
    comm.broadcast(repeats, src=0)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(case["rounds"]):
        for kind, call in calls.items():
            comm.barrier()
            start = time.perf_counter()
            for _ in range(repeats[0]):
                call()
            slowest = np.array([(time.perf_counter() - start) / repeats[0]])
            comm.all_reduce(slowest, op="max")
            times[kind].append(float(slowest[0]))
    return times


def run_rank(port: int, rank: int, size: int, cases: list[dict[str, Any]]) -> None:
    """All cases, as rank `rank`; rank 0 prints each one's times as JSON."""
    comm = holmes_comm.init(holmes_comm.TcpStore("127.0.0.1", port), rank, size, transport="shm", timeout_s=60.0)
    for case in cases:
        times = time_all(comm, case)
        if rank == 0:
            print(json.dumps(case | {"times_s": times}), flush=True)


def run(size: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases' results, of `size` ranks that are processes."""
    store = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", json.dumps([store.port, rank, size, cases])],
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        lines = ranks[0].communicate(timeout=600)[0].splitlines()
        if any(rank.wait(60) != 0 for rank in ranks):
            raise SystemExit("a rank failed; see above")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append", help="again for more numbers of them")
    parser.add_argument("--mib", type=int, action="append", help="of the larger array; again for more sizes")
    parser.add_argument("--operation", action="append", choices=OPERATIONS)
    parser.add_argument("--rounds", type=int, default=15, help="medians of so many, the kinds in turns")
    parser.add_argument(
        "--json", type=Path, help="where results are written (default: results/shared.json, if all ran)"
    )
    arguments = parse_or_work(parser, lambda job: run_rank(*job))
    results = []
    print("| ranks | operation | MiB | ordinary ms | shared ms | times as fast | quartiles |\n" + "| --- " * 7 + "|")
    for size in arguments.ranks or [2, 4]:
        cases = [
            {"ranks": size, "operation": operation, "size_bytes": mib << 20, "rounds": arguments.rounds}
            for operation in arguments.operation or OPERATIONS
            for mib in arguments.mib or [1, 4, 16, 64]
        ]
        for result in run(size, cases):
            times = result["times_s"]
            ratios = [a / b for a, b in zip(times["ordinary"], times["shared"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            ordinary_ms, shared_ms = (1e3 * statistics.median(times[kind]) for kind in KINDS)
            case = f"| {size} | {result['operation']} | {result['size_bytes'] >> 20} "
            print(f"{case}| {ordinary_ms:.2f} | {shared_ms:.2f} | {middle:.2f} | {low:.2f} to {high:.2f} |", flush=True)
            results.append(result)
    is_whole = not (arguments.ranks or arguments.mib or arguments.operation)
    target = arguments.json or (Path(__file__).parent / "results" / "shared.json" if is_whole else None)
    if target:
        target.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
