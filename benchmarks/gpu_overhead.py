"""What a call costs over the same call of raw NCCL: `python benchmarks/gpu_overhead.py [--ranks 2] [--dry-run]`.

Both are called from Python on one stream, taking turns (A B A B ...), with NCCL's own communicator over ctypes beside
ours on the same interface. `call_us` is the host's time until a call returns, `operation_us` that until the GPU is
done, both of a row of calls divided by their number, medians over rounds of the slowest rank. The aim: under 3 us a
call, and under 2 % of the operation from 1 MiB on. `--dry-run`: on the fake NCCL of the tests, where the call's time
means something and the operation's nothing. Exits with 1 where an aim is missed (never in a dry run).
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import statistics
import sys
import time
from typing import Any

from gpu_memory import memory, use_fakes
from gpu_ranks import communicator, launch

SIZES_BYTES = [8, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
DRY_SIZES_BYTES = [8, 64 << 10, 1 << 20]
AIM_CALL_US = 3.0
AIM_SHARE = 0.02
AIM_FROM_BYTES = 1 << 20
ROUNDS = 15
CALLS = 20
WARMUPS = 5
FLOAT32, SUM = 7, 0


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class RawNccl:
    """A communicator of NCCL's own, without anything of ours around it."""

    def __init__(self, path: str, store: Any, rank: int, size: int) -> None:
        self.library = ctypes.CDLL(path)
        self.library.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
        self.library.ncclAllReduce.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        unique_id = UniqueId()
        if rank == 0:
            self.check(self.library.ncclGetUniqueId(ctypes.byref(unique_id)))
            store.set("raw/id", bytes(unique_id))
        unique_id = UniqueId.from_buffer_copy(store.get("raw/id"))
        self.comm = ctypes.c_void_p()
        self.check(self.library.ncclCommInitRank(ctypes.byref(self.comm), size, unique_id, rank))

    def check(self, result: int) -> None:
        if result != 0:
            raise RuntimeError(f"raw NCCL: result {result}")

    def all_reduce(self, address: int, count: int, stream: int) -> None:
        self.check(self.library.ncclAllReduce(address, address, count, FLOAT32, SUM, self.comm, stream))


def measure(store: Any, rank: int, size: int, sizes_bytes: list[int], rounds: int) -> dict[str, Any]:
    from holmes_comm import _C
    from holmes_comm.nccl_agreement import nccl_package_paths

    # One GPU has several ranks: NCCL takes only ranks of different hosts for that.
    os.environ["NCCL_HOSTID"] = f"raw{rank}"
    comm = communicator(store, rank, size)
    place = memory(comm.device or 0)
    raw = RawNccl(_C.nccl_library(nccl_package_paths())["path"], store, rank, size)
    rows = []
    for size_bytes in sizes_bytes:
        # Zeros stay zeros, however often they are added.
        block = place.make(size_bytes // 4, 0.0)
        stream = place.stream

        # partial, not a closure: it binds this round's block.
        calls = {
            "raw": functools.partial(raw.all_reduce, block.address, block.count, stream),
            "ours": functools.partial(comm.all_reduce, block.array),
        }
        times: dict[str, list[tuple[float, float]]] = {"raw": [], "ours": []}
        for turn in range(WARMUPS + rounds):
            for name, call in calls.items():
                comm.barrier()
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                issued = time.perf_counter()
                place.synchronize()
                done = time.perf_counter()
                if turn >= WARMUPS:
                    times[name].append((1e6 * (issued - start) / CALLS, 1e6 * (done - start) / CALLS))
        row: dict[str, Any] = {"size_bytes": size_bytes}
        for name, pairs in times.items():
            row[f"{name}_call_us"] = statistics.median(call for call, _ in pairs)
            row[f"{name}_operation_us"] = statistics.median(operation for _, operation in pairs)
        row["call_overhead_us"] = statistics.median(
            ours[0] - raw[0] for ours, raw in zip(times["ours"], times["raw"], strict=True)
        )
        # Of the fastest rounds, which other work on the machine disturbs least.
        row["best_call_overhead_us"] = min(call for call, _ in times["ours"]) - min(call for call, _ in times["raw"])
        row["operation_ratio"] = statistics.median(
            ours[1] / raw[1] for ours, raw in zip(times["ours"], times["raw"], strict=True)
        )
        rows.append(row)
    return {"description": comm.description, "ranks": size, "all_reduce": rows}


def judge(rows: list[dict[str, Any]]) -> list[str]:
    missed = []
    for row in rows:
        if row["call_overhead_us"] >= AIM_CALL_US:
            missed.append(f"{row['size_bytes']} B: {row['call_overhead_us']:.2f} us a call, aim under {AIM_CALL_US}")
        if row["size_bytes"] >= AIM_FROM_BYTES and row["operation_ratio"] >= 1 + AIM_SHARE:
            missed.append(f"{row['size_bytes']} B: {100 * (row['operation_ratio'] - 1):.1f} %, aim under 2 %")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dry-run", action="store_true", help="on the tests' fakes; judges nothing")
    parser.add_argument("--json", help="file for the result")
    arguments = parser.parse_args()
    if arguments.dry_run:
        use_fakes()
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")  # the raw communicator's, in every rank
    sizes_bytes = DRY_SIZES_BYTES if arguments.dry_run else SIZES_BYTES
    result = launch(measure, arguments.ranks, sizes_bytes, arguments.rounds)[0]
    print(f"all_reduce, {arguments.ranks} ranks on one GPU: {result['description']}")
    print("| size | raw call | our call | overhead (median, best) | raw operation | ours | ratio |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in result["all_reduce"]:
        print(
            f"| {row['size_bytes']} B | {row['raw_call_us']:.2f} us | {row['ours_call_us']:.2f} us "
            f"| {row['call_overhead_us']:.2f}, {row['best_call_overhead_us']:.2f} us "
            f"| {row['raw_operation_us']:.1f} us | {row['ours_operation_us']:.1f} us "
            f"| {row['operation_ratio']:.3f} |"
        )
    missed = judge(result["all_reduce"])
    print("aims: " + ("; ".join(missed) if missed else "met"))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result | {"missed": missed, "dry_run": arguments.dry_run}, file, indent=1)
    sys.exit(1 if missed and not arguments.dry_run else 0)


if __name__ == "__main__":
    main()
