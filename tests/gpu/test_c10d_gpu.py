"""`cpu:holmes,cuda:holmes` on a real GPU: what the fakes of test_c10d_cuda.py cannot show."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch_ranks import init, run_ranks

from holmes_comm import NicSelection, torch_backend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def start(rank, size, store):
    os.environ["NCCL_HOSTID"] = f"rank{rank}"  # ranks of one GPU must be of several hosts to NCCL
    torch.cuda.set_device(0)
    init(store, rank, size, "cpu:holmes,cuda:holmes", pg_options=NicSelection(names=("lo",)))


def streams_rank(rank, size, store):
    start(rank, size, store)
    total = size * (size + 1) / 2
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        data = torch.full((1 << 24,), 1.0, device="cuda")
        for _ in range(20):
            data.mul_(1.0)
        data.mul_(rank + 1.0)
        work = dist.all_reduce(data, async_op=True)
        work.wait()  # this stream waits, not the host
        data.mul_(2.0)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        work.wait()
    stream.synchronize()
    assert data.eq(2 * total).all().item()
    # Memory that is freed while the operation runs is not given to somebody else.
    for _ in range(20):
        short_lived = torch.full((1 << 22,), rank + 1.0, device="cuda")
        work = dist.all_reduce(short_lived, async_op=True)
        del short_lived
        torch.full((1 << 22,), -1.0, device="cuda")
        work.wait()
    torch.cuda.synchronize()
    matrix = torch.arange(6.0, device="cuda").reshape(2, 3)
    dist.all_reduce(matrix.t())
    assert matrix.flatten().tolist() == [size * float(i) for i in range(6)]
    future = dist.all_reduce(data, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    assert future.wait().eq(4 * size * total).all().item()
    dist.barrier()
    return torch_backend.device_descriptions()


def graph_rank(rank, size, store):
    start(rank, size, store)
    data = torch.ones(1000, device="cuda")
    dist.all_reduce(data)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(data)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert data.eq(float(size) ** 4).all().item()
    factor = dist._make_nccl_premul_sum(0.5)
    dist.all_reduce(data, factor)
    assert data.eq(float(size) ** 5 / 2).all().item()
    dist.barrier()


def point_to_point_rank(rank, size, store):
    start(rank, size, store)
    data = torch.full((1000,), float(rank), device="cuda")
    if rank == 0:
        dist.send(data, 1)
    elif rank == 1:
        dist.recv(data, 0)
        assert data.eq(0).all().item()
    received = torch.empty(1000, device="cuda")
    mine = torch.full((1000,), float(rank), device="cuda")
    ring = [dist.P2POp(dist.isend, mine, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    assert received.eq((rank - 1) % size).all().item()
    dist.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_streams(size):
    for descriptions in run_ranks(streams_rank, size):
        assert "NCCL" in descriptions[0]


def test_graphs():
    run_ranks(graph_rank, 2)


def test_point_to_point():
    run_ranks(point_to_point_rank, 3)
