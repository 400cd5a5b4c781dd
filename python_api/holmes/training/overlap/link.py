"""Link: the size of a bucket from what the group's link and a small step of the optimizer measure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from holmes.training.overlap.buckets import ParameterSize, lay_out
from holmes.training.overlap.parameters import Trained
from holmes.training.overlap.shards import ShardOptimizer, settings_of
from holmes.training.overlap.storage import BucketStorage
from holmes.training.overlap.transfers import Lane
from holmes.training.overlap.usage import agree

FIXED_COST_SHARE = 0.02  # of a bucket's time that may go into what every collective costs, however small
# Of all gradients that may be in one bucket: the last one of a backward pass has nothing to hide behind.
TAIL_SHARE = 1 / 8
SMALLEST_BYTES = 64 * 1024
_PROBE_BYTES, _LARGEST_PROBE_BYTES = 1 << 20, 1 << 24
_ROUNDS = 5


def bucket_bytes_for(lane: Lane, total_bytes: int, device: torch.device, step: Callable[[], None]) -> int:
    """Collective over the lane's group, some tenths of a second at most on slow links; equal on all ranks.

    A bucket of n bytes takes about fixed + 2 n / rate: it is reduce-scattered and gathered, and its fixed cost is two
    of the smallest collectives and one small `step` of the inner optimizer. All are measured. The bucket is as small
    as keeps the fixed cost at FIXED_COST_SHARE of that, and no larger than TAIL_SHARE of `total_bytes`.
    """
    if lane.size == 1:
        return max(total_bytes, 1)
    latency_s, rate = measure(lane, device)
    ((step_ns,),) = agree(lane.group, [[round(_median_taken_s(step) * 1e9)]], device)
    return bucket_bytes_from(2 * latency_s + step_ns / 1e9, rate / 2, total_bytes)


def bucket_bytes_from(fixed_s: float, bytes_per_s: float, total_bytes: int) -> int:
    """The rule itself: `bytes_per_s` of a bucket there and back, `fixed_s` however small it is."""
    wanted = fixed_s * bytes_per_s * (1 - FIXED_COST_SHARE) / FIXED_COST_SHARE
    return int(max(SMALLEST_BYTES, min(wanted, total_bytes * TAIL_SHARE)))


def measure(lane: Lane, device: torch.device) -> tuple[float, float]:
    """Collective. Seconds of the smallest reduce-scatter, and bytes per second of larger ones beyond that."""
    latency_s = _median_s(lane, lane.size, device)
    size_bytes = _PROBE_BYTES
    while True:
        taken_s = _median_s(lane, size_bytes // 4, device)
        # Far above the latency it is the rate that counts.
        if taken_s > 10 * latency_s or size_bytes >= _LARGEST_PROBE_BYTES:
            return latency_s, size_bytes / max(taken_s - latency_s, 1e-9)
        size_bytes *= 4


def _median_s(lane: Lane, numel: int, device: torch.device) -> float:
    numel -= numel % lane.size
    source = torch.zeros(numel, device=device)
    output = source[: numel // lane.size].clone()

    def call() -> None:
        lane.reduce_scatter(-1, output, source).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    taken_s = _median_taken_s(call)
    lane.collect()
    ((slowest_ns,),) = agree(lane.group, [[round(taken_s * 1e9)]], device)
    return slowest_ns / 1e9


def _median_taken_s(call: Callable[[], None]) -> float:
    taken = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def small_step(
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    device: torch.device,
) -> Callable[[], None]:
    """Local. The step of a shard with one element, to be timed; arguments as of ShardOptimizer."""
    parameter = nn.Parameter(torch.zeros(1, device=device))
    (bucket,) = lay_out([0], [ParameterSize(1, parameter.element_size(), parameter.dtype)], 1, 1)
    trained = [Trained("one element", parameter, 0)]
    shard = ShardOptimizer(
        BucketStorage(bucket, trained, 0, torch.zeros(bucket.numel, device=device), is_early=False),
        0,
        trained,
        optimizer_class,
        arguments,
        groups,
    )
    settings = settings_of(groups)
    return lambda: shard.step(shard.gradients(1.0), frozenset(), settings)
