"""pytest-benchmark version: `pytest benchmarks/bench_collectives.py --benchmark-autosave`, then `--benchmark-compare`.

Ranks are threads of this process over an in-memory store; rank 0 is the one that pytest-benchmark times. For figures
against other libraries use `holmes bench`.
"""

import threading

import numpy as np
import pytest

import holmes_comm

RANKS = 4
CALLS = {
    "all_reduce": lambda comm, whole, part, other: comm.all_reduce(whole),
    "reduce_scatter": lambda comm, whole, part, other: comm.reduce_scatter(part, whole),
    "all_gather": lambda comm, whole, part, other: comm.all_gather(whole, part),
    "all_to_all": lambda comm, whole, part, other: comm.all_to_all(whole, other),
    "barrier": lambda comm, whole, part, other: comm.barrier(),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size_bytes", [8 * RANKS, 64 << 10, 4 << 20, 64 << 20])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("operation", CALLS)
def test_collective(benchmark, operation, transport, size_bytes):
    if operation == "barrier" and size_bytes != 8 * RANKS:
        pytest.skip("a barrier has no size")
    rounds = 200 if size_bytes <= 64 << 10 else 10
    store = holmes_comm.LocalStore()
    failures = []

    def run(rank, repeat):
        nics = holmes_comm.NicSelection(nic_class="loopback")
        comm = holmes_comm.init(store, rank, RANKS, nics=nics, transport=transport, name="bench", timeout_s=60)
        whole = np.zeros(size_bytes // 4, np.float32)
        part = np.zeros(whole.size // RANKS, np.float32)
        other = np.zeros_like(whole)
        repeat(lambda: CALLS[operation](comm, whole, part, other))

    def follow(rank):
        try:
            run(rank, lambda call: [call() for _ in range(rounds + 1)])
        except Exception as error:
            failures.append(error)

    followers = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, RANKS)]
    for thread in followers:
        thread.start()
    run(0, lambda call: benchmark.pedantic(call, rounds=rounds, warmup_rounds=1))
    for thread in followers:
        thread.join()
    assert not failures
    benchmark.extra_info.update(size_bytes=size_bytes, ranks=RANKS, transport=transport)
