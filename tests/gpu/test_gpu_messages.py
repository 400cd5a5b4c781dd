"""Sends and receives of torch tensors on a real GPU, two thread ranks on one; the same body runs on the CPU.

What goes wrong, and what happens then, is tested on a fake driver: tests/gpu/test_gpu_p2p.py.
"""

from __future__ import annotations

import pytest
import torch
from ranks import run_communicators

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[NEEDS_GPU, pytest.mark.gpu])]
COUNTS = [0, 1, 1000, (512 << 10) - 1, (512 << 10) + 1, (9 << 20) + 5]  # around a slot and the whole ring

pytestmark = pytest.mark.parametrize("device", DEVICES)


def numbers(count: int, seed: int, device: str) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_every_size_in_both_directions_at_once(device: str, transport: str) -> None:
    def body(comm) -> None:
        rank, peer = comm.rank, 1 - comm.rank
        works, received = [], []
        for seed, count in enumerate(COUNTS):
            works.append(comm.send(numbers(count, seed + 10 * rank, device), peer, seed, async_op=True))
            received.append(torch.zeros(count, dtype=torch.uint8, device=device))
            works.append(comm.recv(received[-1], peer, seed, async_op=True))
        for work in works:
            work.wait()
        for seed, (count, tensor) in enumerate(zip(COUNTS, received, strict=True)):
            assert torch.equal(tensor, numbers(count, seed + 10 * peer, device))

    run_communicators(2, body, transport=transport)


def test_one_end_may_be_host_memory(device: str) -> None:
    def body(comm) -> None:
        wanted = numbers(COUNTS[-1], 3, "cpu")
        if comm.rank == 0:
            comm.send(wanted.to(device), 1)
            comm.send(wanted, 1)
        else:
            on_host, there = torch.zeros_like(wanted), torch.zeros_like(wanted, device=device)
            assert comm.recv(on_host, 0) == 0
            assert comm.recv(there, 0) == 0
            assert torch.equal(on_host, wanted)
            assert torch.equal(there.cpu(), wanted)

    run_communicators(2, body)


def test_order_with_the_callers_stream(device: str) -> None:
    """What is sent is what the stream computes, what follows a receive sees it; the caller synchronizes nothing."""
    count = 4 << 20

    def steps(comm, rounds: int) -> None:
        data = torch.zeros(count, device=device)
        for number in range(rounds):
            if comm.rank == 0:
                for _ in range(20):
                    data.mul_(1.5)  # the GPU is busy for a while
                data.fill_(number + 1.0)
                comm.send(data, 1)
                data.fill_(-1.0)
            else:
                data.fill_(-2.0)
                comm.recv(data, 0)
                assert float((data * 2).sum()) == 2.0 * (number + 1) * count

    def body(comm) -> None:
        if device == "cuda":
            with torch.cuda.stream(torch.cuda.Stream()):
                steps(comm, 5)
        else:
            steps(comm, 2)

    run_communicators(2, body)
