"""Groups of hundreds of ranks on one machine: set-up, every operation, sockets of a rank, and an all_reduce of 8 bytes.

python benchmarks/bench_wide.py                                    # 1,024 ranks over TCP: 16 processes of 64 threads
python benchmarks/bench_wide.py --processes 256 --threads 1
python benchmarks/bench_wide.py --processes 4 --threads 32 --mesh  # the same ranks, every pair connected
python benchmarks/bench_wide.py --processes 8 --clusters 2         # 512 ranks of two clusters
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

import holmes_comm

ROUNDS = 20
PING_PONGS = 200
NEVER = 2**31 - 1


def check_operations(comm: Any) -> None:
    """Every operation against its plain result, of a few bytes and of more."""
    rank, size = comm.rank, comm.size
    ranks = np.arange(size, dtype="int64")
    for count in (1, 5000):
        data = np.full(count, rank, "int64")
        comm.all_reduce(data)
        assert (data == ranks.sum()).all(), "all_reduce"
        root = size // 2 + 1
        data = np.full(count, rank, "int64")
        comm.broadcast(data, root)
        assert (data == root).all(), "broadcast"
        data = np.full(count, rank, "int64")
        comm.reduce(data, root)
        assert (data == (ranks.sum() if rank == root else rank)).all(), "reduce"
    gathered = np.empty(2 * size, "int64")
    comm.all_gather(gathered, np.full(2, rank))
    assert (gathered == np.repeat(ranks, 2)).all(), "all_gather"
    part = np.empty(2, "int64")
    comm.reduce_scatter(part, np.repeat(ranks, 2) + rank)
    assert (part == size * rank + ranks.sum()).all(), "reduce_scatter"
    exchanged = np.empty(size, "int64")
    comm.all_to_all(exchanged, rank * size + ranks)
    assert (exchanged == ranks * size + rank).all(), "all_to_all"
    outputs = np.empty(size, "int64") if rank == root else None
    comm.gather(np.full(1, rank), outputs, root)
    assert outputs is None or (outputs == ranks).all(), "gather"
    own = np.empty(1, "int64")
    comm.scatter(own, 3 * ranks if rank == root else None, root)
    assert own[0] == 3 * rank, "scatter"
    for distance in (1, size // 2 + 1):  # of the same row, and of neither row nor column
        came = np.empty(3, "int64")
        work = comm.recv(came, (rank - distance) % size, async_op=True)
        comm.send(np.full(3, rank), (rank + distance) % size)
        work.wait()
        assert (came == (rank - distance) % size).all(), "send and recv"
    comm.barrier()


def hop_us(comm: Any) -> float:
    """Microseconds of a message of 8 bytes from rank 0 to rank 1 while all others sleep."""
    data, taken = np.zeros(1), 0.0
    if comm.rank < 2:
        other = 1 - comm.rank
        start = time.perf_counter()
        for turn in range(2 * PING_PONGS):
            comm.send(data, other) if turn % 2 == comm.rank else comm.recv(data, other)
        taken = time.perf_counter() - start
    comm.barrier()
    return taken / PING_PONGS / 2 * 1e6


def run_rank(store: Any, rank: int, job: dict, together: threading.Barrier) -> dict:
    options = holmes_comm.CommunicatorOptions(wide_min_ranks=NEVER if job["mesh"] else 25)
    together.wait()
    begun, used_s = time.monotonic(), time.process_time()
    comm = holmes_comm.init(
        store, rank, job["size"], name="bench", transport=job["transport"], options=options,
        timeout_s=job["limit_s"], connect_timeout_s=job["limit_s"],
        cluster=f"c{rank * job['clusters'] // job['size']}" if job["clusters"] > 1 else None,
    )  # fmt: skip
    connected, used_s = time.monotonic(), time.process_time() - used_s
    found = {
        "begun": begun,
        "connected": connected,
        "process": os.getpid(),
        "used_s": used_s,
        "sockets": len(comm.connections()),
    }
    try:
        return found | run_operations(comm)
    except holmes_comm.HolmesError as error:
        return found | {"failure": str(error)}


def run_operations(comm: Any) -> dict:
    comm.barrier()
    start = time.monotonic()
    check_operations(comm)
    check_s = time.monotonic() - start
    hop = hop_us(comm)
    sums = []
    for _ in range(ROUNDS):
        comm.barrier()
        start = time.perf_counter()
        comm.all_reduce(np.zeros(1))
        sums.append((time.perf_counter() - start) * 1e6)
    comm.barrier()
    return {"check_s": check_s, "hop_us": hop, "sums_us": sums}


def run_process(first: int, job: dict, pipe: Connection, together: Any) -> None:
    port = pipe.recv()
    store = holmes_comm.TcpStore("127.0.0.1", port, timeout_s=job["limit_s"])
    results: list[Any] = [None] * job["threads"]
    threading.stack_size(512 * 1024)

    def body(index: int) -> None:
        try:
            results[index] = run_rank(store, first + index, job, together)
        except Exception:
            results[index] = traceback.format_exc()
            print(f"rank {first + index}: {results[index].splitlines()[-1]}", file=sys.stderr, flush=True)

    threads = [threading.Thread(target=body, args=(index,)) for index in range(job["threads"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(results)


def run_job(job: dict) -> list[Any]:
    """What every rank returns, or its traceback."""
    context = multiprocessing.get_context("fork")  # before anything has a thread
    together = context.Barrier(job["size"])
    pipes, processes = [], []
    for number in range(job["processes"]):
        own, other = context.Pipe()
        arguments = (number * job["threads"], job, other, together)
        processes.append(context.Process(target=run_process, args=arguments))
        processes[-1].start()
        pipes.append(own)
    server = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
    try:
        for pipe in pipes:
            pipe.send(server.port)
        end = time.monotonic() + job["limit_s"]
        results = []
        for pipe in pipes:
            if not pipe.poll(max(end - time.monotonic(), 0)):
                raise SystemExit(f"not done within {job['limit_s']:g} s")
            results += pipe.recv()
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--threads", type=int, default=64, help="ranks of each process")
    parser.add_argument("--transport", default="tcp", choices=["tcp", "auto"])
    parser.add_argument("--mesh", action="store_true", help="connect every pair")
    parser.add_argument("--clusters", type=int, default=1, help="that the ranks are of, in equal shares")
    parser.add_argument("--limit-s", type=float, default=300, help="of all of it")
    job = vars(parser.parse_args())
    job["size"] = job["processes"] * job["threads"]
    results = run_job(job)
    failed = [result for result in results if isinstance(result, str)]
    if failed:
        raise SystemExit(f"{len(failed)} of {job['size']} ranks failed, one of them so:\n{failed[0]}")
    used_s: dict[int, float] = {}
    for result in results:
        used_s[result["process"]] = max(result["used_s"], used_s.get(result["process"], 0.0))
    sockets = [result["sockets"] for result in results]
    set_up_s = max(result["connected"] for result in results) - min(result["begun"] for result in results)
    found = {
        **job,
        "set_up_s": round(set_up_s, 1),
        "set_up_processor_s": round(sum(used_s.values()), 1),
        "sockets": [min(sockets), max(sockets)],
    }
    print(json.dumps(found), flush=True)
    failures = [result["failure"] for result in results if "failure" in result]
    if failures:
        raise SystemExit(
            f"{len(failures)} of {job['size']} ranks failed after the set-up, one of them so:\n{failures[0]}"
        )
    sums = [statistics.median(column) for column in zip(*[result["sums_us"] for result in results], strict=True)]
    hop = max(result["hop_us"] for result in results)
    found = {
        "operations_s": round(max(result["check_s"] for result in results), 1),
        "hop_us": round(hop, 1),
        "all_reduce_8_bytes_us": round(statistics.median(sums), 1),
        "all_reduce_8_bytes_hops": round(statistics.median(sums) / hop, 1),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
