"""What the ranks of test_torch_cuda.py do, each a process of torch's CUDA build with a fake GPU of its own number."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from gpu_beside_nccl import HELD_BYTES, JUDGED, SYNCHRONOUS, Fakes, count_calls, nccl_calls, operations, peak_bytes

import holmes_comm.torch_backend  # noqa: F401

BACKENDS = ("nccl", "holmes")


def start(rank, size, store):
    """A group of each backend, on this rank's GPU."""
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
    return {name: dist.new_group(list(range(size)), backend=name) for name in BACKENDS}


def filled(count, value):
    return torch.full((count,), float(value), device="cuda")


def values(rank, size, store):
    """Every operation gives the same with both, on the current stream and beside it."""
    for group in start(rank, size, store).values():
        for is_async in (False, True):

            def done(work, is_async=is_async):
                assert (work is not None) == is_async
                if is_async:
                    work.wait()

            total = size * (size + 1) / 2
            data = filled(1000, rank + 1)
            done(dist.all_reduce(data, group=group, async_op=is_async))
            assert set(data.tolist()) == {total}
            share, whole = filled(5, -1), torch.arange(5.0 * size).cuda()
            done(dist.reduce_scatter_tensor(share, whole, group=group, async_op=is_async))
            assert share.tolist() == [size * (5.0 * rank + i) for i in range(5)]
            done(dist.all_gather_into_tensor(whole, filled(5, rank), group=group, async_op=is_async))
            assert whole.tolist() == [float(r) for r in range(size) for _ in range(5)]
            done(dist.broadcast(data := filled(7, rank), 1, group=group, async_op=is_async))
            assert set(data.tolist()) == {1.0}
            done(dist.all_to_all_single(whole, filled(5 * size, rank), group=group, async_op=is_async))
            assert whole.tolist() == [float(r) for r in range(size) for _ in range(5)]
            with dist._coalescing_manager(group, data.device, async_ops=is_async) as block:
                for one in (many := [filled(3, rank + i) for i in range(16)]):
                    dist.all_reduce(one, group=group)
            if is_async:
                block.wait()
            assert [set(one.tolist()) for one in many] == [{float(2 * i + 1)} for i in range(16)]
        if rank == 0:
            dist.send(filled(4, 5), 1, group=group)
        else:
            dist.recv(data := filled(4, 0), 0, group=group)
            assert set(data.tolist()) == {5.0}
        received = filled(4, -1)
        ring = [
            dist.P2POp(dist.isend, filled(4, rank), 1 - rank, group),
            dist.P2POp(dist.irecv, received, 1 - rank, group),
        ]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        assert set(received.tolist()) == {1.0 - rank}
        dist.barrier(group=group)


class Pass(torch.autograd.Function):
    """The parameter itself, without a kernel."""

    @staticmethod
    def forward(context, parameter):
        return parameter.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient.clone()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(100 * (i + 1))) for i in range(6)])

    def forward(self):
        return [Pass.apply(part) for part in self.parts]


def ddp(rank, size, store):
    """DDP's own reducer, buckets and streams: the gradients are the ranks' mean."""
    for group in start(rank, size, store).values():
        for is_view in (False, True):
            model = torch.nn.parallel.DistributedDataParallel(
                Model().cuda(),
                process_group=group,
                bucket_cap_mb=0.001,
                gradient_as_bucket_view=is_view,
                init_sync=False,  # its concatenation is a kernel
            )
            for step in range(3):
                outputs = model()
                torch.autograd.backward(outputs, [filled(out.numel(), rank + step) for out in outputs])
                for part in model.module.parts:
                    assert set(part.grad.tolist()) == {step + (size - 1) / 2}, part.grad
                model.zero_grad(set_to_none=True)


def graphs(rank, size, store):
    """A captured operation runs with each launch, with both."""
    for group in start(rank, size, store).values():
        data = filled(8, 1)
        dist.all_reduce(data, group=group)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            dist.all_reduce(data, group=group)
            dist.all_reduce(data, group=group, async_op=True).wait()
        for _ in range(2):
            graph.replay()
        assert set(data.tolist()) == {float(size**5)}
        del graph
        dist.barrier(group=group)


def costs(rank, size, store):
    """No more calls of NCCL, and no more memory held, than by ProcessGroupNCCL. Calls, in the words of a table."""
    groups, fakes = start(rank, size, store), Fakes()
    found = {}
    for name, call in operations(rank, size).items():
        is_judged = name in (*JUDGED, *SYNCHRONOUS) or name.endswith(", async")
        if not is_judged or name == "all_to_all_single":  # NCCL's own all_to_all is for one process's equal parts
            continue
        data = torch.zeros(1 << 10, device="cuda")
        row = {}
        for backend, group in groups.items():
            for _ in range(3):
                call(group, data)
            torch.cuda.synchronize()
            dist.barrier(groups["nccl"])
            counted = count_calls(fakes, call, group, data)
            row[backend] = (nccl_calls(counted["calls"]), peak_bytes(fakes, call, group) / HELD_BYTES)
            dist.barrier(groups["nccl"])
        found[name] = row
    return found
