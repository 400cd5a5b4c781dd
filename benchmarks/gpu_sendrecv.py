"""Sends of a GPU's memory without a kernel, against NCCL's socket transport, with a matrix multiplication beside them:
`python benchmarks/gpu_sendrecv.py [--nics SELECTION] [--json FILE] [--dry-run]`.

Two processes, each on a GPU of its own where there are two, else on one. For both ways and every size: the bandwidth of
messages that follow each other, and how much slower multiplications of rank 0 are while messages are under way. Aims:
bandwidth at least NCCL's, a loss under 2 % (NCCL's is stated beside it). On one GPU the two processes share its time,
which counts against a kernel of the peer's process too. `--dry-run`: the tests' fake CUDA driver and fake NCCL and the
processor's multiplications (nothing is judged), so that every line runs without a GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SIZES_BYTES = [64 << 10, 1 << 20, 16 << 20, 256 << 20]
DRY_SIZES_BYTES = [64 << 10, 1 << 20]
BYTES_PER_ROUND = 1 << 30
ROUNDS = 5
MOST_LOSS = 0.02
LARGE_BYTES = 1 << 20  # what is judged
WAYS = ("copy engine", "NCCL sockets")
FAKES = Path(__file__).parent.parent / "tests" / "helpers"


class RealGpu:
    """torch on this rank's GPU."""

    rounds = ROUNDS
    sizes_bytes = SIZES_BYTES
    bytes_per_round = BYTES_PER_ROUND

    def __init__(self, rank: int) -> None:
        self.number = rank if torch.cuda.device_count() > 1 else 0
        torch.cuda.set_device(self.number)
        self.compute = torch.cuda.Stream()
        self.factors = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2)]

    def array(self, size_bytes: int, value: int) -> Any:
        return torch.full((size_bytes,), value, dtype=torch.uint8, device="cuda")

    def is_filled(self, array: Any, value: int) -> bool:
        return bool((array == value).all())

    def multiply(self, count: int) -> float:
        """Seconds of `count` multiplications on a stream of their own."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.compute):
            begin.record()
            for _ in range(count):
                torch.mm(*self.factors)
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class FakeGpu:
    """The fake driver of the tests; multiplications on the processor."""

    rounds = 1
    sizes_bytes = DRY_SIZES_BYTES
    bytes_per_round = 8 << 20

    def __init__(self, rank: int) -> None:
        import fake_gpu  # type: ignore[import-not-found]

        self.fake = fake_gpu
        self.number = rank
        self.factors = [torch.randn(128, 128) for _ in range(2)]
        torch.set_num_threads(1)

    def array(self, size_bytes: int, value: int) -> Any:
        return self.fake.Array(torch.full((size_bytes,), value, dtype=torch.uint8).numpy(), self.number)

    def is_filled(self, array: Any, value: int) -> bool:
        return bool((array.values == value).all())

    def multiply(self, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            torch.mm(*self.factors)
        return time.perf_counter() - start

    def synchronize(self) -> None:
        self.fake.synchronize(0)


def bandwidth(comm: Any, gpu: Any, size_bytes: int) -> float:
    """Collective. Bytes per second from rank 0 to rank 1, on rank 0's clock, the last one acknowledged."""
    count = max(gpu.bytes_per_round // size_bytes, 4)
    data, answer = gpu.array(size_bytes, comm.rank + 1), gpu.array(1, 0)
    gpu.synchronize()
    comm.barrier()
    start = time.perf_counter()
    if comm.rank == 0:
        works = [comm.send(data, 1, async_op=True) for _ in range(count)]
        works.append(comm.recv(answer, 1, async_op=True))
    else:
        works = [comm.recv(data, 0, async_op=True) for _ in range(count)]
        for work in works:
            work.wait()
        works = [comm.send(answer, 0, async_op=True)]
    for work in works:
        work.wait()
    seconds = time.perf_counter() - start
    if comm.rank == 1 and not gpu.is_filled(data, 1):
        raise SystemExit("a message arrived with other bytes than were sent")
    return count * size_bytes / seconds


def multiplications(gpu: Any, seconds: float) -> int:
    """How many take about so long."""
    gpu.multiply(3)
    count = 4
    while (took_s := gpu.multiply(count)) < seconds / 4:
        count *= 2
    return max(int(count * seconds / took_s), 1)


def loss(comm: Any, host: Any, gpu: Any, size_bytes: int, rate: float, count: int) -> float | None:
    """Collective. By what part rank 0's multiplications are slower beside messages than alone; None on rank 1."""
    alone_s = gpu.multiply(count) if comm.rank == 0 else 0.0
    messages = torch.tensor([int(alone_s * rate / size_bytes * 1.5) + 4])
    host.broadcast(messages, 0)
    data = gpu.array(size_bytes, 1)
    gpu.synchronize()
    comm.barrier()
    works = [
        comm.send(data, 1, async_op=True) if comm.rank == 0 else comm.recv(data, 0, async_op=True)
        for _ in range(int(messages))
    ]
    beside_s = gpu.multiply(count) if comm.rank == 0 else 0.0
    has_outlasted = not works[-1].is_completed()
    for work in works:
        work.wait()
    comm.barrier()
    if comm.rank == 1:
        return None
    if not has_outlasted:
        print(f"# {size_bytes}: the messages ended before the multiplications; the loss is too low", file=sys.stderr)
    return float(1 - alone_s / beside_s)


def run_rank(rank: int, port: int, nics: str | None, is_dry: bool, results: Any) -> None:
    if is_dry:
        sys.path.insert(0, str(FAKES))
    import holmes_comm

    gpu = FakeGpu(rank) if is_dry else RealGpu(rank)
    store = holmes_comm.TcpStore("127.0.0.1", port, is_server=rank == 0)
    selection = holmes_comm.NicSelection.parse(nics) if nics else holmes_comm.NicSelection(names=("lo",))
    host = holmes_comm.init(store, rank, 2, name="host", nics=selection, transport="tcp", timeout_s=120.0)
    nccl = holmes_comm.init(
        store,
        rank,
        2,
        name="nccl",
        backend="nccl",
        device=gpu.number,
        nics=selection,
        nccl_host_id=f"rank{rank}",
        nccl_variables={"NCCL_MNNVL_ENABLE": "0", "NCCL_IB_DISABLE": "1"},
        timeout_s=120.0,
    )
    comms = dict(zip(WAYS, (host, nccl), strict=True))
    count = multiplications(gpu, 0.02 if is_dry else 0.5) if rank == 0 else 0
    rows = []
    for size_bytes in gpu.sizes_bytes:
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        losses: dict[str, list[float]] = {way: [] for way in WAYS}
        for round_number in range(gpu.rounds + 1):
            for way, comm in comms.items():  # they take turns
                rate = bandwidth(comm, gpu, size_bytes)
                # Smaller ones are too many to have them all under way at once.
                part = loss(comm, host, gpu, size_bytes, rate, count) if size_bytes >= LARGE_BYTES else None
                if round_number > 0:  # the first one warms up
                    rates[way].append(rate)
                    losses[way] += [part] if part is not None else []
        if rank == 0:
            row: dict[str, Any] = {"size_bytes": size_bytes}
            for way in WAYS:
                row[way] = {
                    "gbytes_per_s": statistics.median(rates[way]) / 1e9,
                    "matmul_loss": statistics.median(losses[way]) if losses[way] else None,
                }
            ours, theirs = (rates[way] for way in WAYS)
            row["of_nccl"] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            rows.append(row)
    if rank == 0:
        results.put(rows)
    host.barrier()


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'bytes':>10} {'GB/s':>8} {'NCCL':>8} {'of NCCL':>8} {'matmul loss':>12} {'beside NCCL':>12}"]
    for row in rows:
        ours, theirs = (row[way] for way in WAYS)
        losses = ["-" if way["matmul_loss"] is None else f"{way['matmul_loss']:.1%}" for way in (ours, theirs)]
        lines.append(
            f"{row['size_bytes']:10} {ours['gbytes_per_s']:8.2f} {theirs['gbytes_per_s']:8.2f} {row['of_nccl']:8.2f} "
            f"{losses[0]:>12} {losses[1]:>12}"
        )
    return "\n".join(lines)


def start(context: Any, target: Callable[..., None], arguments: argparse.Namespace, results: Any) -> list[Any]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [
        context.Process(target=target, args=(rank, port, arguments.nics, arguments.dry_run, results), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    return processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on the tests' fakes; says that it proves nothing")
    parser.add_argument("--nics", help="as HOLMES_NICS; default the loopback interface")
    parser.add_argument("--timeout-s", type=float, default=480.0)
    parser.add_argument("--json", help="file for the result")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("no GPU here; use --dry-run to walk through without one")
    if arguments.dry_run:
        sys.path.insert(0, str(FAKES))
        import fake_gpu

        if fake_gpu.find("fake_cuda") is None:
            parser.error("--dry-run needs the fakes: configure the build with -DHOLMES_TESTS=ON (`make test-cpp` does)")
        os.environ.update(fake_gpu.environment(fake_gpu.VERSIONS[-1]))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = start(context, run_rank, arguments, results)
    rows = results.get(timeout=arguments.timeout_s)
    for process in processes:
        process.join(30)
    name = "fake GPU, dry run: nothing is proven" if arguments.dry_run else torch.cuda.get_device_name()
    gpus = 2 if not arguments.dry_run and torch.cuda.device_count() > 1 else 1
    print(f"# {name}, {gpus} GPU(s), NICs {arguments.nics or 'lo'}")
    print(table(rows))
    large = [row for row in rows if row["size_bytes"] >= LARGE_BYTES]
    is_met = all(row["of_nccl"] >= 1 and row[WAYS[0]]["matmul_loss"] < MOST_LOSS for row in large)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"device": name, "gpus": gpus, "rows": rows, "is_met": is_met}, file, indent=1)
    if any(process.exitcode != 0 for process in processes) or (not arguments.dry_run and not is_met):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
