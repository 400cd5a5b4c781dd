"""Several ranks on one GPU over NCCL, one process and one NCCL host id each, for gpu_check.sh."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from typing import Any

SIZES_BYTES = [1024, 64 * 1024, 1024 * 1024, 16 * 1024 * 1024]
WARMUPS = 5
REPEATS = 50


def check(comm: Any, rank: int, size: int) -> dict[str, Any]:
    """Operations against their results, and the stream semantics."""
    import torch

    device = torch.device("cuda", 0)
    total = size * (size + 1) / 2
    data = torch.full((1000003,), rank + 1.0, device=device)
    comm.all_reduce(data)
    assert data.eq(total).all().item(), "all_reduce"
    gathered = torch.empty(size * 1000, device=device)
    comm.all_gather(gathered, torch.full((1000,), float(rank), device=device))
    wanted = torch.arange(size, device=device, dtype=torch.float32).repeat_interleave(1000)
    assert gathered.equal(wanted), "all_gather"
    share = torch.empty(1000, device=device)
    comm.reduce_scatter(share, torch.full((size * 1000,), rank + 1.0, device=device))
    assert share.eq(total).all().item(), "reduce_scatter"
    other = torch.empty(1000, device=device)
    mine = torch.full((1000,), float(rank), device=device)
    for work in comm.batch([("send", mine, (rank + 1) % size, 0), ("recv", other, (rank - 1) % size, 0)]):
        work.wait()
    assert other.eq((rank - 1) % size).all().item(), "batch"
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.full((1 << 22,), 1.0, device=device)
        late.mul_(rank + 1.0)
        comm.all_reduce(late)
        late.mul_(2.0)
    stream.synchronize()
    assert late.eq(2 * total).all().item(), "stream order"
    comm.barrier()
    return {"description": comm.description}


def overhead(comm: Any, rank: int, size: int) -> dict[str, Any]:
    """Host time of a call and time of an all_reduce, by size."""
    import torch

    rows = []
    for size_bytes in SIZES_BYTES:
        data = torch.ones(size_bytes // 4, device="cuda")
        for _ in range(WARMUPS):
            comm.all_reduce(data)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(REPEATS):
            comm.all_reduce(data)
        issued = time.perf_counter()
        torch.cuda.synchronize()
        done = time.perf_counter()
        rows.append(
            {
                "size_bytes": size_bytes,
                "call_us": 1e6 * (issued - start) / REPEATS,
                "all_reduce_us": 1e6 * (done - start) / REPEATS,
            }
        )
    return {"all_reduce": rows}


def run_rank(case: str, rank: int, size: int, port: int, results: Any) -> None:
    import torch

    import holmes_comm

    torch.cuda.set_device(0)
    store = holmes_comm.TcpStore("127.0.0.1", port, is_server=rank == 0)
    comm = holmes_comm.init(
        store,
        rank,
        size,
        backend="nccl",
        device=0,
        nics=holmes_comm.NicSelection(names=("lo",)),
        nccl_host_id=f"rank{rank}",
        nccl_variables={"NCCL_MNNVL_ENABLE": "0"},
        timeout_s=120.0,
    )
    outcome = {"check": check, "overhead": overhead}[case](comm, rank, size)
    comm.barrier()
    if rank == 0:
        results.put(outcome)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--port", type=int, default=29531)
    parser.add_argument("case", choices=["check", "overhead"])
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(
            target=run_rank, args=(arguments.case, rank, arguments.ranks, arguments.port, results), daemon=True
        )
        for rank in range(arguments.ranks)
    ]
    for process in ranks:
        process.start()
    outcome = results.get(timeout=280)
    for process in ranks:
        process.join(30)
    print(json.dumps(outcome, indent=1))
    if any(process.exitcode != 0 for process in ranks):
        os._exit(1)


if __name__ == "__main__":
    main()
