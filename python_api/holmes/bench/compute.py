"""`holmes bench compute`: how long a GPT's parts take on this machine, with one rank or several on the same cores."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np

from holmes.bench.timing import machine_cpu_s

#: Parts of a model in the order in which they are timed; "optimizer" is AdamW over the layers' parameters, "sharding"
#: what holmes.DistributedOptimizer adds to a backward and that update.
PARTS = ("embedding", "layer", "head", "optimizer", "sharding")
_PER_PARAMETER = ("optimizer", "sharding")
DTYPES = ("float32", "bfloat16", "float16")
_WARM_UP_CALLS = 3
_LEAST_CALLS = 3
_START_TIMEOUT_S = 300.0  # ranks import torch before they meet


@dataclass(frozen=True)
class ComputeSettings:
    """What is timed: the sizes of a GPT, samples of a micro-batch, and how. The same on every rank.

    `layers` are run one after the other, as a stage does, so that weights come from where a stage's come from; the
    result is of one. `ranks`: numbers of processes that compute at once, each with `threads` threads.
    """

    hidden: int
    heads: int
    sequence: int
    vocabulary: int = 51200
    layers: int = 4
    micro_batch: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    ranks: tuple[int, ...] = (1,)
    rounds: int = 3
    seconds: float = 1.0  # of each part and round

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "sequence", "vocabulary", "layers", "micro_batch", "threads", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.hidden % self.heads:
            raise ValueError(f"heads={self.heads} must divide hidden={self.hidden}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is unknown; known are {', '.join(DTYPES)}")
        if not self.ranks or min(self.ranks) < 1:
            raise ValueError(f"ranks={list(self.ranks)} must be numbers of at least 1, such as 1,2,4")
        if not self.seconds > 0:
            raise ValueError(f"seconds={self.seconds} must be above 0")


def run_compute(settings: ComputeSettings, on_row: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Times every part for each number of ranks; calls `on_row` with each row of the result as it is there.

    A row: ranks, part, forward_us and backward_us (of one layer; of optimizer and sharding ns_per_parameter), the mean
    over calls and ranks, the median over rounds; foreign_cores: what processes beside the ranks kept busy. Backwards
    add to gradients that are there. Raises RuntimeError where a rank fails.
    """
    rows = []
    for ranks in settings.ranks:
        # [ranks, rounds, parts, 5]: a call's forward and backward; wall, own and the machine's processor seconds
        times = _run_ranks(settings, ranks)
        middle = np.median(times[..., :2].mean(axis=0), axis=0)
        foreign_s = times[0, :, :, 4].sum(axis=0) - times[..., 3].sum(axis=(0, 1))
        foreign_cores = np.maximum(foreign_s, 0) / times[0, :, :, 2].sum(axis=0)
        for part, (first, second), foreign in zip(PARTS, middle, foreign_cores, strict=True):
            row: dict[str, Any] = {"ranks": ranks, "part": part, "foreign_cores": float(foreign)}
            if part in _PER_PARAMETER:
                row["ns_per_parameter"] = max(first, 0.0) * 1e9  # sharding is a difference
            else:
                row |= {"forward_us": first * 1e6, "backward_us": second * 1e6}
            rows.append(row)
            on_row(row)
    return rows


def _run_ranks(settings: ComputeSettings, ranks: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    barrier, results = context.Barrier(ranks), context.Queue()
    text = json.dumps(dataclasses.asdict(settings))
    processes = [context.Process(target=_rank, args=(text, barrier, results), daemon=True) for _ in range(ranks)]
    for process in processes:
        process.start()
    found: list[Any] = []
    try:
        while len(found) < ranks:
            if not results.empty():
                outcome = results.get()
                if isinstance(outcome, str):
                    raise RuntimeError(f"a rank of {ranks} failed: {outcome}")
                found.append(outcome)
            elif any(process.exitcode not in (None, 0) for process in processes):
                codes = [process.exitcode for process in processes]
                raise RuntimeError(f"a rank of {ranks} ended before it reported; exit codes {codes}")
            else:
                time.sleep(0.02)
    finally:
        for process in processes:
            if len(found) < ranks:
                process.terminate()
            process.join()
    return np.array(found)


def _rank(text: str, barrier: Barrier, results: Any) -> None:
    try:
        fields = json.loads(text)
        times = _time_parts(ComputeSettings(**{**fields, "ranks": tuple(fields["ranks"])}), barrier)
    except Exception as error:  # goes to the parent, which raises it
        barrier.abort()
        results.put(f"{type(error).__name__}: {error}")
        return
    results.put(times)


def _time_parts(settings: ComputeSettings, barrier: Barrier) -> list[list[tuple[float, ...]]]:
    from holmes.bench.compute_parts import make_parts

    parts = make_parts(settings)
    rounds: list[list[tuple[float, ...]]] = []
    for _ in range(settings.rounds):
        timed: list[tuple[float, ...]] = []
        for name in PARTS:
            part = parts[name]
            for _ in range(_WARM_UP_CALLS):
                part.call()
            barrier.wait(_START_TIMEOUT_S)
            machine_s, cpu_s = machine_cpu_s(), time.process_time()
            first_s, second_s, calls, start = 0.0, 0.0, 0, time.perf_counter()
            while calls < _LEAST_CALLS or time.perf_counter() - start < settings.seconds:
                pair = part.call()
                first_s, second_s, calls = first_s + pair[0], second_s + pair[1], calls + 1
            spent = (time.perf_counter() - start, time.process_time() - cpu_s, machine_cpu_s() - machine_s)
            timed.append((first_s / calls / part.units, second_s / calls / part.units, *spent))
        rounds.append(timed)
    return rounds
