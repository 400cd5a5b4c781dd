"""Schedules of training over several NCCL libraries on fake devices: `python schedule_worker.py CASE [serialised]`.

Ranks are threads, each with a device of its own; the numbers that arrive are checked. `serialised`: every operation
waits for the last one of each other library, as this backend once did.
"""

from __future__ import annotations

import sys

import numpy as np
from fake_gpu import Array, compute, copy, make_stream, synchronize
from nccl_worker import make
from ranks import run_threads

import holmes_comm

COUNT = 64
MOST_CTAS = 48  # of a kernel that computes
FORWARD_US, BACKWARD_US = 1000, 2000
#: The libraries, each an image; how long a kernel of theirs runs.
KERNEL_US = {
    "tensor": 300,
    "data": 3000,
    "pipeline": 500,
    "shard": 1500,
    "replica": 3000,
    "one": 0,
    "two": 0,
    "three": 0,
}


class Device:
    """A rank's device: communicators by library, one stream that computes."""

    def __init__(self, rank: int, store: holmes_comm.LocalStore, is_serialised: bool) -> None:
        self.rank, self.store, self.is_serialised = rank, store, is_serialised
        self.stream = make_stream()
        self.last: dict[str, holmes_comm.Work] = {}
        self.held: list[object] = []

    def join(self, library: str, name: str, ranks: list[int]) -> holmes_comm.Communicator:
        variables = {"NCCL_FAKE_NAME": library, "NCCL_FAKE_US": str(KERNEL_US[library])}
        return make(
            self.store,
            ranks.index(self.rank),
            len(ranks),
            name=name,
            nccl_variables=variables,
            timeout_s=60.0,
            device=self.rank,
        )

    def array(self, value: float, count: int = COUNT, stream: int | None = None) -> Array:
        made = Array(np.full(count, value), self.rank, stream or self.stream)
        self.held.append(made)
        return made

    def start(self, library: str, call: str, comm: holmes_comm.Communicator, *arguments: object) -> holmes_comm.Work:
        """An asynchronous operation, behind what the stream has."""
        if self.is_serialised:
            for other, work in self.last.items():
                if other != library:
                    work.wait_stream(self.stream)
        self.last[library] = getattr(comm, call)(*arguments, async_op=True)
        return self.last[library]

    def run(self, library: str, call: str, comm: holmes_comm.Communicator, *arguments: object) -> None:
        """The stream goes on behind it."""
        self.start(library, call, comm, *arguments).wait_stream(self.stream)

    def compute(self, microseconds: int, label: str) -> None:
        compute(self.rank, self.stream, microseconds, MOST_CTAS, label)


def ring(device: Device) -> None:
    """Three ranks, a group and library for each pair: all receive first, then send.

    In turn one rank sends when the rank behind it has sent: a receive and a send of two libraries are on that one's
    device at once, however the host schedules the ranks.
    """
    size, rank = 3, device.rank
    names = ("one", "two", "three")
    pairs = [sorted((first, (first + 1) % size)) for first in range(size)]
    comms = {}
    for name, pair in zip(names, pairs, strict=True):
        if rank in pair:
            comms[tuple(pair)] = (name, device.join(name, name, pair), pair)
    before, behind = (rank - 1) % size, (rank + 1) % size
    for turn in range(10):
        received, mine = device.array(-1.0), device.array(100.0 * turn + rank)
        name, comm, pair = comms[tuple(sorted((rank, before)))]
        early = device.start(name, "recv", comm, received, pair.index(before))
        name, comm, pair = comms[tuple(sorted((rank, behind)))]
        late = None if device.is_serialised else turn % size
        if rank == late:
            device.store.get(f"turn {turn}: {behind} has sent", timeout_s=60.0)
        device.start(name, "send", comm, mine, pair.index(behind)).wait_stream(device.stream)
        if before == late:
            synchronize(device.stream)
            device.store.set(f"turn {turn}: {rank} has sent", b"")
        early.wait_stream(device.stream)
        synchronize(device.stream)
        assert set(received.values) == {100.0 * turn + before}


STAGES, CHUNKS, MICRO_BATCHES = 4, 2, 8


def interleaved(device: Device) -> None:
    """Megatron-LM's interleaved 1F1B on 4 stages of 2 chunks, each stage 2 tensor-parallel ranks: receives are posted a
    step early in both directions, two all_reduces in every pass, a bucket of gradients after the last one of a chunk.
    """
    stage, half = divmod(device.rank, 2)
    pair = [2 * stage, 2 * stage + 1]
    tensor = device.join("tensor", f"t{stage}", pair)
    data = device.join("data", f"d{stage}", pair)
    links = {}  # by direction and the stage that sends
    for direction, step in (("F", 1), ("B", -1)):
        for sender in range(STAGES):
            ranks = [2 * sender + half, 2 * ((sender + step) % STAGES) + half]
            if device.rank in ranks:
                links[direction, sender] = device.join("pipeline", f"{direction}{sender}{half}", ranks)

    order = [
        (chunk, batch)
        for first in range(0, MICRO_BATCHES, STAGES)
        for chunk in range(CHUNKS)
        for batch in range(first, first + STAGES)
    ]
    passes = {"F": order, "B": [(CHUNKS - 1 - chunk, batch) for chunk, batch in order]}
    warm_up = min(2 * (STAGES - stage - 1) + (CHUNKS - 1) * STAGES, len(order))
    steps = [("F", k) for k in range(warm_up)]
    for k in range(len(order) - warm_up):
        steps += [("F", warm_up + k), ("B", k)]
    steps += [("B", k) for k in range(len(order) - warm_up, len(order))]

    first, last = (0, 0), (STAGES - 1, CHUNKS - 1)
    starts = {"F": first, "B": last}  # where a pass of the whole model begins; the other one is where it ends
    posted: dict[tuple[str, int], tuple[Array, holmes_comm.Work]] = {}
    outputs: dict[int, Array] = {}
    buckets = []

    def post(direction: str, k: int) -> None:
        """The receive of that pass' input, where it has one."""
        if k >= len(order) or (direction, k) in posted or (stage, passes[direction][k][0]) == starts[direction]:
            return
        sender = (stage + (-1 if direction == "F" else 1)) % STAGES
        received = device.array(-1.0)
        work = device.start("pipeline", "recv", links[direction, sender], received, 0)
        posted[direction, k] = (received, work)

    for number, (direction, k) in enumerate(steps):
        chunk, batch = passes[direction][k]
        post(direction, k)
        for other in "FB":  # the next one of each direction
            post(other, next((n for d, n in steps[number + 1 :] if d == other), len(order)))
        if (direction, k) in posted:
            value, work = posted[direction, k]
            work.wait_stream(device.stream)
        else:
            value = device.array(1.0 + batch)
            if direction == "B":
                copy(value, outputs[batch], device.stream)
        for _ in range(2):
            device.compute((FORWARD_US if direction == "F" else BACKWARD_US) // 2, f"{direction}{chunk}.{batch}")
            device.run("tensor", "all_reduce", tensor, value, "avg")
        device.run("tensor", "all_reduce", tensor, value)  # doubles
        sent = device.array(0.0)
        copy(sent, value, device.stream)
        if (stage, chunk) != (last if direction == "F" else first):
            device.start("pipeline", "send", links[direction, stage], sent, 1)
        else:
            outputs[batch] = sent
        if direction == "B" and batch == MICRO_BATCHES - 1:
            buckets.append(device.array(float(half)))
            device.start("data", "all_reduce", data, buckets[-1])
    for work in device.last.values():
        work.wait()
    synchronize(device.stream)
    for batch in range(MICRO_BATCHES):
        if stage == 0:
            assert set(outputs[batch].values) == {(1.0 + batch) * 4.0 ** (STAGES * CHUNKS)}, batch
        elif stage == STAGES - 1:
            assert set(outputs[batch].values) == {(1.0 + batch) * 2.0 ** (STAGES * CHUNKS)}, batch
    assert [set(bucket.values) for bucket in buckets] == [{1.0}] * CHUNKS


LAYERS, TRAINING_STEPS = 6, 2


def sharded(device: Device) -> None:
    """FSDP2's order of operations with tensor parallelism and replicas, 2 x 2 x 2: parameters are gathered a layer
    ahead, two all_reduces in every layer's pass, gradients are reduce-scattered and then summed over the replicas.
    """
    rank = device.rank
    groups = {}
    for library, bit in (("tensor", 1), ("shard", 2), ("replica", 4)):
        ranks = sorted((rank, rank ^ bit))
        groups[library] = device.join(library, f"{library}{ranks[0]}", ranks)
    shard, beside = groups["shard"].rank, make_stream()
    parameters = [device.array(10.0 * layer + shard) for layer in range(LAYERS)]
    for _ in range(TRAINING_STEPS):
        reduced = []
        for direction in "FB":
            layers = list(range(LAYERS)) if direction == "F" else list(reversed(range(LAYERS)))
            gathered: dict[int, tuple[Array, holmes_comm.Work]] = {}

            def gather(layer: int, gathered: dict[int, tuple[Array, holmes_comm.Work]] = gathered) -> None:
                whole = device.array(-1.0, 2 * COUNT)
                work = device.start("shard", "all_gather", groups["shard"], whole, parameters[layer])
                gathered[layer] = (whole, work)

            gather(layers[0])
            for number, layer in enumerate(layers):
                if number + 1 < LAYERS:
                    gather(layers[number + 1])
                whole, work = gathered[layer]
                work.wait_stream(device.stream)
                value = device.array(1.0)
                for _ in range(2):
                    device.compute(FORWARD_US if direction == "F" else BACKWARD_US, f"{direction}{layer}")
                    device.run("tensor", "all_reduce", groups["tensor"], value)
                if direction == "F":
                    assert_later(device, value, 4.0)
                    continue
                part = device.array(-1.0, stream=beside)
                device.start("shard", "reduce_scatter", groups["shard"], part, whole).wait_stream(beside)
                reduced.append((layer, part, device.start("replica", "all_reduce", groups["replica"], part)))
        for layer, part, work in reduced:
            work.wait()
            assert set(part.values) == {4 * (10.0 * layer + shard)}, (layer, part.values)


def assert_later(device: Device, value: Array, wanted: float) -> None:
    """Keeps it for the end: looking at it now would wait for the device."""
    device.held.append((value, wanted))


def finish(device: Device) -> None:
    synchronize(device.stream)
    for one in device.held:
        if isinstance(one, tuple):
            assert set(one[0].values) == {one[1]}


CASES = {"ring": (ring, 3), "interleaved": (interleaved, 8), "sharded": (sharded, 8)}


def main() -> None:
    body, size = CASES[sys.argv[1]]
    is_serialised = sys.argv[2:] == ["serialised"]
    store = holmes_comm.LocalStore()

    def rank_body(rank: int) -> None:
        device = Device(rank, store, is_serialised)
        body(device)
        finish(device)

    run_threads(size, rank_body, timeout_s=100.0)
    print("passed")


if __name__ == "__main__":
    main()
