"""Timing and statistics: agreed iteration counts, interleaved rounds, percentiles, ratios, correctness."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holmes.bench.operations import Case
from holmes.bench.peer import Peer
from holmes.bench.settings import Settings

Samples = NDArray[np.float64]

# Bounds of one round's iterations: the lower gives every round a median, the upper bounds what ranks exchange.
_MIN_ITERATIONS, _MAX_ITERATIONS = 2, 2000


class Control:
    """How ranks agree, beside the libraries under test: barriers, a value of rank 0, samples of all, over the store."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self._store = store
        self._sequence = 0

    def gather(self, samples: Samples) -> list[Samples]:
        """Collective. Returns every rank's float64 samples, by rank, on every rank."""
        key = f"bench/{self._sequence}"
        self._sequence += 1
        self._store.set(f"{key}/{self.rank}", samples.tobytes())
        return [np.frombuffer(bytes(self._store.get(f"{key}/{rank}"))) for rank in range(self.ranks)]

    def maximum(self, samples: Samples) -> Samples:
        """Collective. Returns the element-wise maximum over ranks: an operation is over when its last rank is."""
        slowest: Samples = np.stack(self.gather(samples)).max(axis=0)
        return slowest

    def barrier(self) -> None:
        """Collective. Returns when every rank has come here."""
        self.gather(np.zeros(1))

    def leave(self) -> None:
        """Collective. The last call: rank 0, which may serve the store, returns after all others are done with it."""
        self._store.set(f"bench/left/{self.rank}", b"1")
        if self.rank == 0:
            for rank in range(self.ranks):
                self._store.get(f"bench/left/{rank}")


@dataclass(frozen=True)
class Measurement:
    """What one peer did on one case. Times are of one call, the slowest rank's, in seconds."""

    peer: str
    case: Case
    samples_s: Samples  # of all rounds
    round_medians_s: tuple[float, ...]
    wrong_elements: int  # over all ranks, in the first call
    ratio: float | None  # how many times faster than the baseline: median over rounds; None for the baseline itself

    @property
    def p50_s(self) -> float:
        """Median time."""
        return float(np.percentile(self.samples_s, 50))

    @property
    def p99_s(self) -> float:
        """99th percentile."""
        return float(np.percentile(self.samples_s, 99))

    @property
    def algorithm_gb_per_s(self) -> float:
        """Size over median time, in 1e9 bytes per second."""
        return self.case.size_bytes / self.p50_s / 1e9

    @property
    def bus_gb_per_s(self) -> float:
        """Algorithm bandwidth times nccl-tests' factor: comparable with a link's rate for any number of ranks."""
        return self.algorithm_gb_per_s * self.case.operation.bus_factor(self.case.ranks)


def time_calls(call: Callable[[], None], count: int) -> Samples:
    """Returns the duration of each of `count` calls in seconds."""
    samples = np.empty(count)
    for index in range(count):
        start = time.perf_counter()
        call()
        samples[index] = time.perf_counter() - start
    return samples


def _first_call(peer: Peer, case: Case, control: Control) -> tuple[Callable[[], None], int]:
    """Returns the peer's call on buffers of zeros, and the wrong elements of its first call, on real values."""
    source, output = case.make_buffers()
    call = peer.prepare(case, source, output)
    control.barrier()
    call()
    wrong = sum(int(part[0]) for part in control.gather(np.array([float(case.wrong_elements(output))])))
    # Zeros stay zeros: repeated reductions in place would else overflow.
    source.fill(0)
    return call, wrong


def _agree_iterations(call: Callable[[], None], control: Control, settings: Settings) -> int:
    """Returns the calls of one round, the same on all ranks: what fits the time by the median of the warm-up."""
    warmup_s = float(np.median(control.maximum(time_calls(call, settings.warmup))))
    fitting = settings.seconds / settings.rounds / max(warmup_s, 1e-9)
    return int(min(max(fitting, _MIN_ITERATIONS), _MAX_ITERATIONS))


def measure(
    case: Case, peers: Sequence[Peer], control: Control, settings: Settings, baseline: str | None
) -> list[Measurement]:
    """Collective. Measures `case` on every peer in turns (A B A B ...); checks the first call of each.

    `baseline` names the peer that ratios refer to; they compare rounds that ran next to each other.
    """
    able = [peer for peer in peers if peer.unsupported(case) is None]
    calls = {peer.name: _first_call(peer, case, control) for peer in able}
    iterations = {name: _agree_iterations(call, control, settings) for name, (call, _) in calls.items()}
    rounds: dict[str, list[Samples]] = {name: [] for name in calls}
    for _ in range(settings.rounds):
        for name, (call, _) in calls.items():
            control.barrier()
            samples = time_calls(call, iterations[name])
            rounds[name].append(control.maximum(samples))
    medians = {name: np.array([np.median(samples) for samples in parts]) for name, parts in rounds.items()}

    def ratio(name: str) -> float | None:
        if baseline is None or baseline not in medians or name == baseline:
            return None
        return float(np.median(medians[baseline] / medians[name]))

    return [
        Measurement(name, case, np.concatenate(rounds[name]), tuple(map(float, medians[name])), wrong, ratio(name))
        for name, (_, wrong) in calls.items()
    ]
