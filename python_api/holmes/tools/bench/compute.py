"""`holmes bench compute`: how long a GPT's parts take on this machine, with one rank or several on the same cores."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np

from holmes.tools.bench.timing import machine_cpu_s
from holmes_comm.errors import JobError, UsageError

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
                raise UsageError(f"{name}={getattr(self, name)} must be at least 1")
        if self.hidden % self.heads:
            raise UsageError(f"heads={self.heads} must divide hidden={self.hidden}")
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype={self.dtype!r} is unknown; known are {', '.join(DTYPES)}")
        if not self.ranks or min(self.ranks) < 1:
            raise UsageError(f"ranks={list(self.ranks)} must be numbers of at least 1, such as 1,2,4")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise UsageError(f"device={self.device!r} must be cpu, cuda or cuda:N")
        if not self.seconds > 0:
            raise UsageError(f"seconds={self.seconds} must be above 0")


def run_compute(settings: ComputeSettings, on_row: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Times every part for each number of ranks; calls `on_row` with each row of the result as it is there.

    A row: ranks, part, forward_us and backward_us (of one layer; of optimizer and sharding ns_per_parameter);
    foreign_cores: what processes beside the ranks kept busy. The ranks begin each call together, and it takes as long
    as it takes the slowest of them, for which the others of a job wait too; mean over calls (of sharding the median),
    median over rounds. Backwards add to gradients that are there. Raises RuntimeError where a rank fails.
    """
    rows = []
    for ranks in settings.ranks:
        found = _run_ranks(settings, ranks)  # by rank, round and part
        for number, part in enumerate(PARTS):
            timed = [[of_rank[number] for of_rank in of_round] for of_round in zip(*found, strict=True)]
            average = np.median if part == "sharding" else np.mean  # of a difference, which a single hitch inflates
            first, second = np.median([average(_slowest(each), axis=0) for each in timed], axis=0)
            foreign_s = sum(each[0].machine_s - sum(one.own_s for one in each) for each in timed)
            foreign = max(foreign_s, 0.0) / sum(each[0].wall_s for each in timed)
            row: dict[str, Any] = {"ranks": ranks, "part": part, "foreign_cores": float(foreign)}
            if part in _PER_PARAMETER:
                row["ns_per_parameter"] = max(first, 0.0) * 1e9  # sharding is a difference
            else:
                row |= {"forward_us": first * 1e6, "backward_us": second * 1e6}
            rows.append(row)
            on_row(row)
    return rows


@dataclass(frozen=True)
class _Timed:
    """One rank's calls of one part in one round: forward and backward of each; seconds of all of them."""

    calls: list[tuple[float, float]]
    wall_s: float
    own_s: float  # processor
    machine_s: float  # processor, of all processes


def _slowest(ranks: list[_Timed]) -> list[tuple[float, float]]:
    """Forward and backward of the slowest rank of each call."""
    return [max(call, key=sum) for call in zip(*(rank.calls for rank in ranks), strict=True)]


def _run_ranks(settings: ComputeSettings, ranks: int) -> list[list[list[_Timed]]]:
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    barrier, results = context.Barrier(ranks), context.Queue()
    last = context.Value("i", 0)  # number of the part's last call; 0: not known yet
    text = json.dumps(dataclasses.asdict(settings))
    processes = [context.Process(target=_rank, args=(text, barrier, last, results), daemon=True) for _ in range(ranks)]
    for process in processes:
        process.start()
    found: list[Any] = []
    try:
        while len(found) < ranks:
            if not results.empty():
                outcome = results.get()
                if isinstance(outcome, str):
                    raise JobError(f"a rank of {ranks} failed: {outcome}")
                found.append(outcome)
            elif any(process.exitcode not in (None, 0) for process in processes):
                codes = [process.exitcode for process in processes]
                raise JobError(f"a rank of {ranks} ended before it reported; exit codes {codes}")
            else:
                time.sleep(0.02)
    finally:
        for process in processes:
            if len(found) < ranks:
                process.terminate()
            process.join()
    return found


def _rank(text: str, barrier: Barrier, last: Any, results: Any) -> None:
    try:
        fields = json.loads(text)
        times = _time_parts(ComputeSettings(**{**fields, "ranks": tuple(fields["ranks"])}), barrier, last)
    except Exception as error:  # goes to the parent, which raises it
        barrier.abort()
        results.put(f"{type(error).__name__}: {error}")
        return
    results.put(times)


def _time_parts(settings: ComputeSettings, barrier: Barrier, last: Any) -> list[list[_Timed]]:
    from holmes.tools.bench.compute_parts import make_parts

    parts = make_parts(settings)
    rounds: list[list[_Timed]] = []
    for _ in range(settings.rounds):
        timed: list[_Timed] = []
        for name in PARTS:
            part = parts[name]
            for _ in range(_WARM_UP_CALLS):
                part.call()
            last.value = 0
            barrier.wait(_START_TIMEOUT_S)
            machine_s, cpu_s, start = machine_cpu_s(), time.process_time(), time.perf_counter()
            calls: list[tuple[float, float]] = []
            while True:
                # All leave after the same call: whoever finds the time is up says so before they meet again.
                if len(calls) >= _LEAST_CALLS and time.perf_counter() - start >= settings.seconds:
                    last.value = len(calls)
                barrier.wait(_START_TIMEOUT_S)
                if 0 < last.value <= len(calls):
                    break
                first_s, second_s = part.call()
                calls.append((first_s / part.units, second_s / part.units))
            wall_s = time.perf_counter() - start
            timed.append(_Timed(calls, wall_s, time.process_time() - cpu_s, machine_cpu_s() - machine_s))
            barrier.wait(_START_TIMEOUT_S)  # all have left before it is taken back
        rounds.append(timed)
    return rounds
