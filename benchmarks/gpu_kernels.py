"""The CUDA kernels against the device's copy bandwidth: `python benchmarks/gpu_kernels.py [--json FILE] [--dry-run]`.

Each kernel's bytes are what it has to read and write; its rate is compared with that of a plain copy on the device of
as many bytes, the two taking turns. The aim is 90 %. `--dry-run`: small sizes through torch's CPU operations (nothing
is judged), so that every line but the kernels themselves runs without a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from holmes_comm import kernels

AIM = 0.90
BUCKET_BYTES = 256 << 20  # of 16-bit elements; far beyond the caches
DRY_BYTES = 1 << 20
TENSORS = 300  # of the bucket, of many sizes
GRAIN = 64  # elements that sizes are multiples of, as those of a model's layers: 128-bit accesses stay aligned
AHEAD_CYCLES = 200_000_000  # some 0.1 s in which the host queues the calls that are timed


class Case(NamedTuple):
    """A kernel on given arrays, and how many bytes it has to read and write."""

    name: str
    run: Callable[[], Any]
    moved_bytes: int
    check: Callable[[], bool]


def split(bucket: torch.Tensor, dtype: torch.dtype, align: int) -> list[torch.Tensor]:
    """Tensors that together fill the bucket, sizes as of a model's layers; each begins `align` elements off."""
    generator = torch.Generator().manual_seed(1)
    grains = bucket.numel() // GRAIN
    cuts = (torch.randint(1, grains, (TENSORS - 1,), generator=generator) * GRAIN).sort().values.tolist()
    sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, bucket.numel()], strict=True)]
    return [torch.empty(n + align, dtype=dtype, device=bucket.device).normal_()[align:] for n in sizes if n > 0]


def pack_cases(elements: int, device: str, kind: tuple[torch.dtype, torch.dtype], align: int) -> Iterator[Case]:
    """Tensors of kind[0] to a bucket of kind[1] and back."""
    tensor_dtype, bucket_dtype = kind
    text = " to ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in kind))
    text += ", misaligned" if align else ""
    bucket = torch.zeros(elements, dtype=bucket_dtype, device=device)
    tensors = split(bucket, tensor_dtype, align)
    before = torch.cat(tensors)
    moved_bytes = elements * (tensor_dtype.itemsize + bucket_dtype.itemsize)
    yield Case(
        f"pack {text}",
        lambda: kernels.pack(bucket, tensors, scale=0.5),
        moved_bytes,
        lambda: torch.equal(bucket, (before.float() * 0.5).to(bucket_dtype)),
    )
    yield Case(
        f"unpack {text}",
        lambda: kernels.unpack(bucket, tensors, scale=2.0),
        moved_bytes,
        lambda: torch.equal(torch.cat(tensors), (bucket.float() * 2.0).to(tensor_dtype)),
    )


def accumulate_case(elements: int, device: str) -> Case:
    """16-bit gradients into a float32 bucket."""
    bucket = torch.zeros(elements, device=device)
    tensors = split(bucket, torch.bfloat16, 0)
    return Case(
        "accumulate bfloat16 in float32",
        lambda: kernels.accumulate(bucket, tensors, scale=0.5),
        elements * (2 + 4 + 4),
        lambda: torch.equal(bucket, torch.cat(tensors).float() * 0.5),
    )


def norm_case(elements: int, device: str, dtype: torch.dtype) -> Case:
    """The squared norm of many tensors."""
    tensors = split(torch.empty(elements, device=device), dtype, 0)
    wanted = sum(tensor.double().square().sum() for tensor in tensors)
    return Case(
        f"squared norm {str(dtype).removeprefix('torch.')}",
        lambda: kernels.squared_norm(tensors),
        elements * dtype.itemsize,
        lambda: abs(float(kernels.squared_norm(tensors) / wanted) - 1) < 1e-6,
    )


def sum_case(elements: int, device: str, count: int) -> Case:
    """`count` shards into one of float32."""
    each = elements // count
    shards = [torch.randn(each, device=device).bfloat16() for _ in range(count)]
    output = torch.zeros(each, device=device)
    wanted = torch.zeros(each, device=device)
    for shard in shards:
        wanted += shard
    return Case(
        f"sum of {count} bfloat16 shards in float32",
        lambda: kernels.sum_shards(output, shards),
        each * (2 * count + 4),
        lambda: torch.equal(output, wanted),
    )


def cases(total_bytes: int, device: str) -> Iterator[Case]:
    """One after the other, so that one case's memory is free for the next."""
    elements = total_bytes // 2
    wide, narrow = torch.float32, torch.bfloat16
    for kind in ((wide, narrow), (narrow, narrow), (wide, wide)):
        for align in (0, 1):
            yield from pack_cases(elements, device, kind, align)
    yield accumulate_case(elements, device)
    for dtype in (narrow, wide):
        yield norm_case(elements, device, dtype)
    for count in (2, 8):
        yield sum_case(elements, device, count)


class Timer:
    """Seconds of a call on the device alone, from events; on the CPU from the clock.

    The device is kept busy until the host has queued all calls: building a table of tensors in Python takes longer than
    a kernel.
    """

    def __init__(self, device: str, repeats: int) -> None:
        self.is_gpu = device == "cuda"
        self.repeats = repeats

    def __call__(self, run: Callable[[], Any]) -> float:
        if not self.is_gpu:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)
        begin.record()
        for _ in range(self.repeats):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / self.repeats


def measure(case: Case, timer: Timer, device: str, rounds: int) -> dict[str, Any]:
    """Medians over rounds in which the kernel and the copy take turns."""
    case.run()  # loads the kernel
    is_right = case.check()
    source = torch.empty(max(case.moved_bytes // 2, 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ratios, times = [], []
    for round_number in range(rounds + 1):
        kernel_s = timer(case.run)
        copy_s = timer(lambda: target.copy_(source))
        if round_number > 0:  # the first one warms up
            times.append(kernel_s)
            ratios.append(copy_s / kernel_s)
    kernel_s = statistics.median(times)
    return {
        "kernel": case.name,
        "bytes": case.moved_bytes,
        "gbytes_per_s": case.moved_bytes / kernel_s / 1e9,
        "of_copy": statistics.median(ratios),
        "is_right": is_right,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, small; says that it proves no rate")
    parser.add_argument("--bytes", type=int, default=None, help=f"of a 16-bit bucket (default {BUCKET_BYTES})")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="file for the result")
    arguments = parser.parse_args()
    is_gpu = torch.cuda.is_available() and not arguments.dry_run
    if not is_gpu and not arguments.dry_run:
        parser.error("no GPU here; use --dry-run to walk through without one")
    device = "cuda" if is_gpu else "cpu"
    total_bytes = arguments.bytes or (BUCKET_BYTES if is_gpu else DRY_BYTES)
    timer = Timer(device, repeats=10)
    implementation = kernels.implementation(torch.zeros(1, device=device))
    name = torch.cuda.get_device_name() if is_gpu else platform.processor() or platform.machine()
    print(f"# {name}, torch {torch.__version__}, {implementation}")
    print(f"{'kernel':45} {'bytes':>12} {'GB/s':>9} {'of copy':>8}  right")
    rows = []
    for case in cases(total_bytes, device):
        row = measure(case, timer, device, arguments.rounds if is_gpu else 1)
        rows.append(row)
        rates = f"{row['gbytes_per_s']:9.1f} {row['of_copy']:8.1%}" if is_gpu else f"{'-':>9} {'-':>8}"
        print(f"{row['kernel']:45} {row['bytes']:12} {rates}  {row['is_right']}")
    slow = [row["kernel"] for row in rows if row["of_copy"] < AIM]
    is_proof = is_gpu and implementation == "CUDA kernels"
    verdict = "dry run: no rate is proven" if not is_proof else f"below {AIM:.0%}: {', '.join(slow) or 'none'}"
    print(f"# {verdict}")
    if arguments.json:
        result = {"device": name, "implementation": implementation, "aim": AIM, "verdict": verdict, "rows": rows}
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)
    if not all(row["is_right"] for row in rows) or (is_proof and slow):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
