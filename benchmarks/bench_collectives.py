"""pytest-benchmark version: `pytest benchmarks/bench_collectives.py`.

Ranks are processes; rank 0 is the one that pytest-benchmark times. For figures against other libraries use
`holmes bench`; compare_commits.py times the same calls of two commits in turns.
"""

import json
import subprocess
import sys

import numpy as np
import pytest

import holmes_comm

RANKS = 2  # more than a small machine has cores would measure its scheduler
CALLS = {
    "all_reduce": lambda comm, whole, part, other: comm.all_reduce(whole),
    "reduce_scatter": lambda comm, whole, part, other: comm.reduce_scatter(part, whole),
    "all_gather": lambda comm, whole, part, other: comm.all_gather(whole, part),
    "all_to_all": lambda comm, whole, part, other: comm.all_to_all(whole, other),
    "barrier": lambda comm, whole, part, other: comm.barrier(),
}


CASES = [
    (operation, transport, size_bytes)
    for operation in CALLS
    for transport in ("tcp", "shm")
    for size_bytes in (1 << 10, 64 << 10, 4 << 20, 64 << 20)
    if operation != "barrier" or size_bytes == 1 << 10  # a barrier has no size
]


def prepare(store, rank, operation, transport, size_bytes):
    """Returns the call to time; it keeps its communicator and buffers."""
    nics = holmes_comm.NicSelection(nic_class="loopback")
    comm = holmes_comm.init(store, rank, RANKS, nics=nics, transport=transport, name="bench", timeout_s=60)
    whole = np.zeros(size_bytes // 4, np.float32)
    part = np.zeros(whole.size // RANKS, np.float32)
    other = np.zeros_like(whole)
    return lambda: CALLS[operation](comm, whole, part, other)


def follow(port, rank, calls, *case):
    """The other ranks: make as many calls as rank 0 does."""
    call = prepare(holmes_comm.TcpStore("127.0.0.1", port, is_server=False), rank, *case)
    for _ in range(calls):
        call()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("operation", "transport", "size_bytes"), CASES)
def test_collective(benchmark, operation, transport, size_bytes):
    # Short calls are timed in bulk: one alone is not much longer than reading the clock.
    iterations, rounds, warmup_rounds = (200, 20, 2) if size_bytes <= 64 << 10 else (2, 10, 1)
    store = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
    calls = iterations * (rounds + warmup_rounds) + 1  # calls timed in bulk are followed by one for the result
    followers = [
        subprocess.Popen(
            [sys.executable, __file__, json.dumps([store.port, rank, calls, operation, transport, size_bytes])]
        )
        for rank in range(1, RANKS)
    ]
    try:
        call = prepare(store, 0, operation, transport, size_bytes)
        benchmark.pedantic(call, rounds=rounds, iterations=iterations, warmup_rounds=warmup_rounds)
        assert all(follower.wait(60) == 0 for follower in followers)
    finally:
        for follower in followers:
            follower.kill()
            follower.wait()
    benchmark.extra_info.update(size_bytes=size_bytes, ranks=RANKS, transport=transport)


if __name__ == "__main__":
    follow(*json.loads(sys.argv[1]))
