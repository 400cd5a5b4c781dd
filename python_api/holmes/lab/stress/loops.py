"""The loops: what each kind of group does in a round, as training would, and the check of every result."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

from holmes.lab.stress.patterns import DTYPES, Array, Patterns
from holmes.lab.stress.result import WrongResultError
from holmes.lab.stress.settings import BUCKETS, KINDS, LAYERS, MICRO_BATCHES, Settings
from holmes_comm import Communicator

_UNASKED_TAG = 4096  # no round has so many operations
_UNASKED_BYTES = 1 << 20


def unexpected_bytes(max_bytes: int) -> int:
    """How much a rank may hold of messages that it has not asked for: beyond what a round's sends come to."""
    return max(8 << 20, 4 * MICRO_BATCHES * max_bytes)


class Loop:
    """Rounds of one group until time is over on one of its ranks. One thread; counters may be read from any.

    All ranks of a group make the same choices, from the seed and the number of the round alone.
    """

    def __init__(self, kind: str, row: int, job_rank: int, communicator: Communicator, settings: Settings) -> None:
        self.kind, self._job_rank, self._comm, self._settings = kind, job_rank, communicator, settings
        self.round = self.first_round = settings.first_round
        self.operations = 0
        self.checked_bytes = 0
        self._is_stopped = self._is_mistaken = self._is_flooding = False
        self._operation = 0  # within the round
        self._group = row * len(KINDS) + KINDS.index(kind)
        self._patterns = Patterns(settings.seed, self._group, settings.max_bytes // 4 + communicator.size)
        self._steps = {"dp": self._data_parallel, "tp": self._tensor_parallel, "pp": self._pipeline}

    def run(self, end_s: float) -> None:
        """Collective over the group. Rounds until `end_s` (time.monotonic). Raises WrongResultError, HolmesError."""
        over = np.zeros(1, dtype=np.int32)
        while not over[0]:
            choice = random.Random(f"{self._settings.seed}/{self._group}/{self.round}")
            self._operation = 0
            self._steps[self.kind](choice)
            if self._is_flooding:
                self._flood()
            over[0] = self._is_stopped or time.monotonic() >= end_s
            if self._is_mistaken:
                self._comm.broadcast(over)
            else:
                self._comm.all_reduce(over, op="max")  # all end together
            self.round += 1
            time.sleep(self._settings.pause_s)

    def stop(self) -> None:
        """From any thread: the round that is under way is the last one, on all ranks of the group."""
        self._is_stopped = True

    def make_mistake(self) -> None:
        """From any thread, an injected fault: this rank alone ends its round with another collective."""
        self._is_mistaken = True

    def send_unasked(self) -> None:
        """From any thread, an injected fault: this rank ends its round with messages that nobody receives."""
        self._is_flooding = True

    def _flood(self) -> None:
        peer = (self._comm.rank + 1) % self._comm.size
        message = np.zeros(_UNASKED_BYTES, np.uint8)
        for _ in range(2 * unexpected_bytes(self._settings.max_bytes) // _UNASKED_BYTES):
            self._comm.send(message, peer, _UNASKED_TAG)

    def _data_parallel(self, choice: random.Random) -> None:
        """Buckets of gradients are reduce-scattered while more come; then parameters are all-gathered."""
        size, rank = self._comm.size, self._comm.rank
        buckets = [self._choose(choice, parts=size) for _ in range(BUCKETS)]
        running = []
        for operation, (count, dtype) in enumerate(buckets):
            gradients = self._data(operation, rank, 0, count * size, dtype)
            output = np.empty(count, dtype)
            running.append((self._comm.reduce_scatter(output, gradients, async_op=True), output))
        for operation, ((count, dtype), (work, output)) in enumerate(zip(buckets, running, strict=True)):
            work.wait()
            expected = self._total(operation, range(size), rank * count, count, dtype)
            self._check("reduce_scatter", operation, output, expected)
        for operation, (count, dtype) in enumerate(buckets, start=BUCKETS):
            gathered = np.empty(count * size, dtype)
            self._comm.all_gather(gathered, self._data(operation, rank, 0, count, dtype))
            expected = np.concatenate([self._data(operation, other, 0, count, dtype) for other in range(size)])
            self._check("all_gather", operation, gathered, expected)

    def _tensor_parallel(self, choice: random.Random) -> None:
        """An all-reduce for each layer, one after the other, as activations need."""
        for operation in range(LAYERS):
            count, dtype = self._choose(choice)
            data = self._data(operation, self._comm.rank, 0, count, dtype)
            self._comm.all_reduce(data)
            self._check("all_reduce", operation, data, self._total(operation, range(self._comm.size), 0, count, dtype))

    def _pipeline(self, choice: random.Random) -> None:
        """Micro-batches: activations to the next stage, gradients back to the one before."""
        shapes = [self._choose(choice) for _ in range(2 * MICRO_BATCHES)]
        sends: list[tuple[Any, Array]] = []
        for operation, (count, dtype) in enumerate(shapes):
            step = 1 if operation < MICRO_BATCHES else -1
            source, target = self._comm.rank - step, self._comm.rank + step
            if 0 <= source < self._comm.size:
                received = np.empty(count, dtype)
                self._comm.recv(received, source, operation)
                self._check("recv", operation, received, self._data(operation, source, 0, count, dtype))
            if 0 <= target < self._comm.size:
                data = self._data(operation, self._comm.rank, 0, count, dtype)
                sends.append((self._comm.send(data, target, operation, async_op=True), data))
        for work, _ in sends:
            work.wait()

    def _choose(self, choice: random.Random, parts: int = 1) -> tuple[int, str]:
        """Elements of a part and their type: sizes of all magnitudes up to the largest, odd ones too."""
        dtype = choice.choice(DTYPES)
        largest = self._settings.max_bytes // np.dtype(dtype).itemsize // parts
        return max(1, int(largest ** choice.random())), dtype

    def _data(self, operation: int, rank: int, start: int, count: int, dtype: str) -> Array:
        return self._patterns.data(self._number(operation), rank, start, count, dtype)

    def _total(self, operation: int, ranks: range, start: int, count: int, dtype: str) -> Array:
        return self._patterns.total(self._number(operation), ranks, start, count, dtype)

    def _number(self, operation: int) -> int:
        return self.round * 64 + operation

    def _check(self, name: str, operation: int, found: Array, expected: Array) -> None:
        if self._settings.is_corrupted(self.kind, self.round, self._job_rank) and operation == 0:
            found[len(found) // 2] += 1
        self.operations += 1
        self.checked_bytes += found.nbytes
        if np.array_equal(found, expected):
            return
        wrong = np.flatnonzero(found != expected)
        first = int(wrong[0])
        raise WrongResultError(
            f"{name} number {operation} of round {self.round}: {len(wrong)} of {len(found)} {found.dtype} elements are "
            f"wrong, first [{first}] = {found[first]} instead of {expected[first]}, last [{int(wrong[-1])}]"
        )
