"""torch's own ProcessGroupNCCL beside the backend "holmes", on torch's CUDA build, a fake CUDA and a fake NCCL:
`make bench-cuda-fake BENCH_ARGS='--save'`, or `python benchmarks/gpu_beside_nccl.py [--save] [-k NAME]` in its
environment.

Two processes, each with both groups on its fake GPU. For every operation: what a call asks of CUDA and NCCL, by name,
in the calling thread and in all others; the most that torch's caching allocator has active while the host runs ahead of
a busy GPU by 100 calls on a new tensor each; and the host's time of a call, with the GPU held up, so that nothing runs
meanwhile: medians over rounds in which the two take turns, without the time inside the fakes. Nothing of this is a
GPU's time. Exits with 1 where a promise of docs/nccl.md is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import queue
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

RESULTS = Path(__file__).parent / "results" / "gpu-beside-nccl"
BACKENDS = ("nccl", "holmes")
COUNT = 1 << 10  # elements of a tensor whose values nobody looks at
HELD_BYTES = 64 << 10
CALLS = 40  # of a round
AHEAD = 100
IN_BLOCK = 16
SLACK_CALLS = 0.1  # events are made now and then
# Promised: a call's host time over ProcessGroupNCCL's is at most 1.
JUDGED = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "send/recv", "coalesced block of 16")
SYNCHRONOUS = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast", "all_to_all_single")
Call = Callable[[dist.ProcessGroup, torch.Tensor], Any]


class Fakes:
    """What the fake CUDA driver tells a test."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.driver.fake_cuda_calls.restype = ctypes.c_longlong
        self.text = ctypes.create_string_buffer(1 << 16)

    def take_calls(self, others: bool = False) -> tuple[Counter[str], int]:
        """What this thread, or all others, called since the last question; this thread's nanoseconds inside."""
        inside_ns = self.driver.fake_cuda_calls(int(others), self.text, len(self.text))
        lines = self.text.value.decode().splitlines()
        return Counter({name: int(count) for name, count in (line.split() for line in lines)}), inside_ns

    def hold(self, seconds: float) -> None:
        """The current stream does nothing for so long."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.driver.fake_cuda_busy(stream, int(seconds * 1e3))


def operations(rank: int, size: int) -> dict[str, Call]:
    """Each as a trainer calls it, on a tensor of `size` times as many elements as one rank's part."""

    def part(data: torch.Tensor) -> torch.Tensor:
        return data[: data.numel() // size]

    def reduce_scatter(group: dist.ProcessGroup, data: torch.Tensor) -> Any:
        return dist.reduce_scatter_tensor(torch.empty_like(part(data)), data, group=group)

    def all_gather(group: dist.ProcessGroup, data: torch.Tensor) -> Any:
        return dist.all_gather_into_tensor(torch.empty_like(data), part(data), group=group)

    def all_to_all(group: dist.ProcessGroup, data: torch.Tensor) -> Any:
        return dist.all_to_all_single(torch.empty_like(data), data, group=group)

    def send_recv(group: dist.ProcessGroup, data: torch.Tensor) -> Any:
        return (dist.send if rank == 0 else dist.recv)(data, 1 - rank, group=group)

    def batch(group: dist.ProcessGroup, data: torch.Tensor) -> Any:
        ring = [
            dist.P2POp(dist.isend, data, (rank + 1) % size, group),
            dist.P2POp(dist.irecv, torch.empty_like(data), (rank - 1) % size, group),
        ]
        for work in dist.batch_isend_irecv(ring):
            work.wait()

    def block(group: dist.ProcessGroup, data: torch.Tensor) -> Any:
        with dist._coalescing_manager(group=group, device=data.device):
            for _ in range(IN_BLOCK):
                dist.all_reduce(data, group=group)

    def block_async(group: dist.ProcessGroup, data: torch.Tensor) -> Any:
        with dist._coalescing_manager(group=group, device=data.device, async_ops=True) as manager:
            for _ in range(IN_BLOCK):
                dist.all_reduce(data, group=group)
        manager.wait()

    return {
        "all_reduce": lambda group, data: dist.all_reduce(data, group=group),
        "all_reduce, async": lambda group, data: dist.all_reduce(data, group=group, async_op=True).wait(),
        "reduce_scatter_tensor": reduce_scatter,
        "reduce_scatter_tensor, async": lambda group, data: dist.reduce_scatter_tensor(
            torch.empty_like(part(data)), data, group=group, async_op=True
        ).wait(),
        "all_gather_into_tensor": all_gather,
        "all_gather_into_tensor, async": lambda group, data: dist.all_gather_into_tensor(
            torch.empty_like(data), part(data), group=group, async_op=True
        ).wait(),
        "broadcast": lambda group, data: dist.broadcast(data, 0, group=group),
        "all_to_all_single": all_to_all,
        "send/recv": send_recv,
        "batch_isend_irecv": batch,
        "coalesced block of 16": block,
        "coalesced block of 16, async": block_async,
        "barrier": lambda group, data: dist.barrier(group=group),
    }


def settle(groups: dict[str, dist.ProcessGroup]) -> None:
    """All ranks are here, and nothing runs."""
    torch.cuda.synchronize()
    dist.barrier(groups["nccl"])
    torch.cuda.synchronize()


def wait_for_others(fakes: Fakes) -> None:
    """Until no watchdog of either backend has calls of before left to look after: it looks ten times a second."""
    fakes.take_calls(others=True)
    for _ in range(20):
        time.sleep(0.3)
        if not fakes.take_calls(others=True)[0]:
            return
    raise SystemExit("the other threads go on to call CUDA or NCCL though nothing runs")


def count_calls(fakes: Fakes, call: Call, group: dist.ProcessGroup, data: torch.Tensor) -> dict[str, Any]:
    """Per call: of the calling thread, and of the others, which look after what runs."""
    wait_for_others(fakes)
    fakes.take_calls()
    for _ in range(CALLS):
        call(group, data)
    own, _ = fakes.take_calls()
    torch.cuda.synchronize()
    time.sleep(0.3)  # for who looks after it
    others, _ = fakes.take_calls(others=True)
    fakes.take_calls()
    return {
        "calls": {name: count / CALLS for name, count in sorted(own.items())},
        "others": {name: count / CALLS for name, count in sorted(others.items())},
    }


def peak_bytes(fakes: Fakes, call: Call, group: dist.ProcessGroup) -> int:
    """The most that is active beyond what was, while the host is AHEAD calls ahead."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    fakes.hold(1.0)
    for _ in range(AHEAD):
        call(group, torch.empty(HELD_BYTES, dtype=torch.uint8, device="cuda"))
    peak = torch.cuda.memory_stats()["active_bytes.all.peak"]
    torch.cuda.synchronize()
    return int(peak - before)


def call_us(fakes: Fakes, call: Call, group: dist.ProcessGroup, data: torch.Tensor) -> tuple[float, float]:
    """The host's microseconds of a call outside of the fakes, and with them."""
    fakes.hold(0.05)
    fakes.take_calls()
    begin = time.perf_counter_ns()
    for _ in range(CALLS):
        call(group, data)
    taken_ns = time.perf_counter_ns() - begin
    _, inside_ns = fakes.take_calls()
    torch.cuda.synchronize()
    return (taken_ns - inside_ns) / CALLS / 1e3, taken_ns / CALLS / 1e3


def measure(rank: int, size: int, port: int, arguments: argparse.Namespace, results: Any) -> None:
    os.environ |= {"NCCL_HOSTID": f"rank{rank}"}
    import holmes_comm.torch_backend  # noqa: F401

    torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
    groups = {name: dist.new_group(list(range(size)), backend=name) for name in BACKENDS}
    fakes = Fakes()
    rows = {}
    for name, call in operations(rank, size).items():
        if arguments.k not in name:
            continue
        row: dict[str, Any] = {backend: {} for backend in BACKENDS}
        data = torch.zeros(COUNT * size, device="cuda")
        for backend, group in groups.items():
            for _ in range(5):
                call(group, data)
            settle(groups)
            row[backend] |= count_calls(fakes, call, group, data)
            settle(groups)
            if name != "barrier":
                row[backend]["peak_bytes"] = peak_bytes(fakes, call, group)
            settle(groups)
        times: dict[str, list[tuple[float, float]]] = {backend: [] for backend in BACKENDS}
        for _ in range(arguments.rounds if name != "barrier" else 0):
            for backend, group in groups.items():
                settle(groups)
                times[backend].append(call_us(fakes, call, group, data))
        for backend, taken in times.items():
            if taken:
                row[backend]["host_us"] = statistics.median(own for own, _ in taken)
                row[backend]["with_fakes_us"] = statistics.median(all_ for _, all_ in taken)
        rows[name] = row
        if rank == 0:
            print(f"# {name}", file=sys.stderr, flush=True)
    results.put((rank, rows))
    settle(groups)
    dist.destroy_process_group()


def nccl_calls(counts: dict[str, float]) -> float:
    return sum(count for name, count in counts.items() if name.startswith("nccl"))


def cuda_calls(counts: dict[str, float]) -> float:
    """Without the questions for the current device, of which torch asks many and none reaches a GPU."""
    return sum(count for name, count in counts.items() if not name.startswith(("nccl", "cuCtx", "cuDevicePrimary")))


def judged(name: str, row: dict[str, Any]) -> list[str]:
    """What of the promises this row misses."""
    theirs, ours = (row[backend] for backend in BACKENDS)
    missed = []
    for what, count in (("CUDA", cuda_calls), ("NCCL", nccl_calls)):
        for who, whose in (("calls", ""), ("others", " in other threads")):
            mine, its = (count(one[who]) for one in (ours, theirs))
            if mine > its + SLACK_CALLS:
                missed.append(f"{mine:.3g} calls of {what}{whose}, ProcessGroupNCCL {its:.3g}")
    if name.removesuffix(", async") in JUDGED and ours["host_us"] > theirs["host_us"]:
        missed.append(f"host time {ours['host_us']:.1f} us, ProcessGroupNCCL {theirs['host_us']:.1f} us")
    if name in SYNCHRONOUS and ours["peak_bytes"] > theirs["peak_bytes"]:
        missed.append(f"peak {ours['peak_bytes']} bytes, ProcessGroupNCCL {theirs['peak_bytes']}")
    return missed


def table(rows: dict[str, Any]) -> str:
    lines = [
        "| operation | host us | over NCCL's | CUDA calls | NCCL calls | waits of streams "
        "| other threads' CUDA calls | peak, in tensors |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        cells = [name]
        theirs, ours = (row[backend] for backend in BACKENDS)
        has_time = "host_us" in ours
        cells.append(f"{theirs['host_us']:.1f} / {ours['host_us']:.1f}" if has_time else "-")
        cells.append(f"{ours['host_us'] / theirs['host_us']:.2f}" if has_time else "-")
        for counts in (
            lambda one: cuda_calls(one["calls"]),
            lambda one: nccl_calls(one["calls"]),
            lambda one: one["calls"].get("cuStreamWaitEvent", 0),
            lambda one: cuda_calls(one["others"]),
        ):
            cells.append(f"{counts(theirs):.3g} / {counts(ours):.3g}")
        cells.append(" / ".join(f"{one['peak_bytes'] / HELD_BYTES:g}" for one in (theirs, ours)) if has_time else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def by_name(rows: dict[str, Any]) -> str:
    lines = []
    for name, row in rows.items():
        for backend in BACKENDS:
            for who in ("calls", "others"):
                counts = ", ".join(f"{call} {count:.3g}" for call, count in row[backend][who].items())
                thread = "calling thread" if who == "calls" else "others"
                lines.append(f"- {name}, {backend}, {thread}: {counts or '-'}")
    return "\n".join(lines)


def page(rows: dict[str, Any], missed: dict[str, list[str]], command: str) -> str:
    misses = [f"- {name}: {text}" for name, texts in missed.items() for text in texts] or ["- nothing"]
    return "\n".join(
        [
            "# ProcessGroupNCCL and holmes beside each other, on a fake GPU",
            "",
            f"`{command}`, torch {torch.__version__}, {os.cpu_count()} cores, rank 0 of 2. "
            "Each cell: ProcessGroupNCCL / holmes.",
            "No GPU was there: memory is the host's, streams are threads; what is counted and timed is the host's.",
            "",
            table(rows),
            "",
            "What is missed of the promises:",
            "",
            *misses,
            "",
            "## Calls by name, per operation",
            "",
            by_name(rows),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("-k", default="", help="only operations with this in their name")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}.json and .md")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or not torch.cuda.get_device_name(0).startswith("Fake"):
        parser.error("this needs torch's CUDA build on the fake CUDA driver: run `make bench-cuda-fake`")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=measure, args=(rank, 2, port, arguments, results), daemon=True) for rank in range(2)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    while len(found) < len(processes):
        try:
            found |= [results.get(timeout=1)]
        except queue.Empty:
            if any(process.exitcode for process in processes):
                raise SystemExit("a process ended before its results were there; what it said is above") from None
    for process in processes:
        process.join(60)
    rows = found[0]
    # A send's other end is the receive.
    if "send/recv" in rows:
        rows = {"send": rows["send/recv"], "recv": found[1]["send/recv"]} | rows
        del rows["send/recv"]
    missed = {name: judged("send/recv" if name in ("send", "recv") else name, row) for name, row in rows.items()}
    command = "python benchmarks/gpu_beside_nccl.py " + " ".join(sys.argv[1:])
    text = page(rows, missed, command.strip())
    print(text)
    if arguments.save:
        RESULTS.with_suffix(".json").write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(text)
    if any(missed.values()) or any(process.exitcode != 0 for process in processes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
