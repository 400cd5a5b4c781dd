"""What the ranks of test_torch_cuda.py do, each a process of torch's CUDA build with a fake GPU of its own number."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from gpu_beside_nccl import HELD_BYTES, Fakes, count_calls, cuda_calls, nccl_calls, operations, peak_bytes

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


def lists(rank, size, store):
    """The forms of separate tensors, and uneven parts, give the same with both; also a root that is not rank 0."""
    for group in start(rank, size, store).values():
        for is_async in (False, True):

            def done(work, is_async=is_async):
                if is_async:
                    work.wait()

            parts = [filled(5, -1) for _ in range(size)]
            done(dist.all_gather(parts, filled(5, rank), group=group, async_op=is_async))
            assert [set(part.tolist()) for part in parts] == [{float(r)} for r in range(size)]
            root = size - 1
            parts = [filled(3, -1) for _ in range(size)] if rank == root else None
            done(dist.gather(filled(3, rank + 1), parts, dst=root, group=group, async_op=is_async))
            if rank == root:
                assert [set(part.tolist()) for part in parts] == [{r + 1.0} for r in range(size)]
            share = filled(4, -1)
            sources = [filled(4, 10 + r) for r in range(size)] if rank == root else None
            done(dist.scatter(share, sources, src=root, group=group, async_op=is_async))
            assert set(share.tolist()) == {10.0 + rank}
            data = filled(6, rank + 1)
            done(dist.reduce(data, root, group=group, async_op=is_async))
            assert rank != root or set(data.tolist()) == {size * (size + 1) / 2}
            done(dist.reduce_scatter(share, [filled(4, r + rank) for r in range(size)], group=group, async_op=is_async))
            assert set(share.tolist()) == {float(sum(rank + r for r in range(size)))}
            # Rank r sends 1 + p elements to rank p, of the value 10 r + p.
            sends = [filled(1 + peer, 10 * rank + peer) for peer in range(size)]
            received = [filled(1 + rank, -1) for _ in range(size)]
            done(dist.all_to_all(received, sends, group=group, async_op=is_async))
            assert [one.tolist() for one in received] == [[10.0 * r + rank] * (1 + rank) for r in range(size)]
            whole, cuts = filled(size * (size + 1) // 2, -1), [1 + peer for peer in range(size)]
            for at, one in zip(whole.split(cuts), sends, strict=True):
                at.copy_(one)
            exchanged = filled(size * (1 + rank), -1)
            done(dist.all_to_all_single(exchanged, whole, [1 + rank] * size, cuts, group=group, async_op=is_async))
            assert exchanged.tolist() == [10.0 * r + rank for r in range(size) for _ in range(1 + rank)]
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
    import copy_kernels  # noqa: F401

    for group in start(rank, size, store).values():
        for is_view in (False, True):
            inner = Model().cuda()
            for part in inner.parts:
                part.data.fill_(float(rank + 1))
            model = torch.nn.parallel.DistributedDataParallel(
                inner, process_group=group, bucket_cap_mb=0.001, gradient_as_bucket_view=is_view
            )
            assert {value for part in inner.parts for value in part.tolist()} == {1.0}  # rank 0's
            for step in range(3):
                outputs = model()
                torch.autograd.backward(outputs, [filled(out.numel(), rank + step) for out in outputs])
                for part in model.module.parts:
                    assert set(part.grad.tolist()) == {step + (size - 1) / 2}, part.grad
                model.zero_grad(set_to_none=True)


def fsdp2(rank, size, store):
    """FSDP2's own parameters, streams and hooks: the shards of the gradients are the ranks' mean."""
    import copy_kernels  # noqa: F401
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    for group in start(rank, size, store).values():
        for reshards in (False, True):
            model = Model().cuda()
            for number, part in enumerate(model.parts):
                part.data.fill_(float(number))
            fully_shard(model, mesh=DeviceMesh.from_group(group, "cuda"), reshard_after_forward=reshards)
            for step in range(3):
                outputs = model()
                for number, out in enumerate(outputs):
                    assert set(out.tolist()) == {float(number)}
                    assert out.numel() == 100 * (number + 1)
                torch.autograd.backward(outputs, [filled(out.numel(), rank + step) for out in outputs])
                for number, part in enumerate(model.parts):
                    grad = part.grad.to_local()
                    assert grad.numel() == 100 * (number + 1) // size
                    assert set(grad.tolist()) == {step + (size - 1) / 2}, grad
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
    """No more calls of NCCL and CUDA, other threads' included, and no more memory held, than by ProcessGroupNCCL."""
    groups, fakes = start(rank, size, store), Fakes()
    found = {}
    for name, call in operations(rank, size).items():
        data = torch.zeros(1 << 10, device="cuda")
        row = {}
        for backend, group in groups.items():
            for _ in range(3):
                call(group, data)
            torch.cuda.synchronize()
            dist.barrier(groups["nccl"])
            counted = count_calls(fakes, call, group, data)
            row[backend] = {
                "calls of NCCL": nccl_calls(counted["calls"]),
                "calls of CUDA": cuda_calls(counted["calls"]),
                "other threads' calls of NCCL": nccl_calls(counted["others"]),
                "other threads' calls of CUDA": cuda_calls(counted["others"]),
            }
            if name != "barrier":
                row[backend]["tensors held"] = peak_bytes(fakes, call, group) / HELD_BYTES
            dist.barrier(groups["nccl"])
        found[name] = row
    return found
