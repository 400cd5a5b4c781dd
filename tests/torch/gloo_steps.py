"""What torch.distributed is asked for, step by step: each returns what a rank sees, the same with Gloo and with Holmes.

A step is run by every rank over a fresh default group. Numbers are small integers where the order of additions could
show, so that results are compared exactly.
"""

import tempfile
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

#: Name -> function(rank, size).
STEPS = {}
#: What Gloo may refuse or end on, by step: why. Holmes must do it all the same.
GLOO_REFUSES = {
    "all_reduce_avg": "Gloo has no AVG",
    "all_to_all": "Gloo has no all_to_all of lists",
    "all_gather_uneven": "Gloo's pieces are of one size",
    "broadcast_wide_types": "Gloo has no such types",
    "split_group": "torch splits groups of backends that can, which Gloo's cannot",
    "destroy_and_init_again": "in a store that was used before Gloo may find the addresses of the group before",
}
#: The same, of versions of torch older than the one named.
GLOO_REFUSES_BEFORE = {
    "pipeline_gpipe": ((2, 10), "stages learn shapes by a receive into another type, on which Gloo ends the process"),
    "pipeline_1f1b": ((2, 10), "as above"),
}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int32, torch.int64, torch.uint8)
CPU = torch.device("cpu")


def step(function):
    STEPS[function.__name__] = function
    return function


def data(rank, shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


# --- reductions ---


@step
def all_reduce(rank, size):
    op = dist.ReduceOp
    of_all, of_integers = (op.SUM, op.PRODUCT, op.MIN, op.MAX), (op.BAND, op.BOR, op.BXOR)
    cases = [(o, d) for o in of_all for d in FLOATS + INTEGERS] + [(o, d) for o in of_integers for d in INTEGERS]
    tensors = [data(rank, (13,), dtype) for _, dtype in cases]
    for (operation, _), tensor in zip(cases, tensors, strict=True):
        dist.all_reduce(tensor, operation)
    return tensors


@step
def all_reduce_avg(rank, size):
    tensor = data(rank, (5,))
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert torch.equal(tensor, sum(data(r, (5,)) for r in range(size)) / size)
    return tensor


@step
def all_reduce_async(rank, size):
    tensors = [data(rank + i, (100,)) for i in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    return tensors, [work.is_completed() for work in works]


@step
def all_reduce_complex(rank, size):
    tensor = torch.complex(data(rank, (4,)), data(rank + 7, (4,)))
    dist.all_reduce(tensor)
    return tensor


@step
def all_reduce_empty(rank, size):
    tensor = torch.empty(0)
    dist.all_reduce(tensor)
    return tensor


@step
def all_reduce_large(rank, size):
    tensor = data(rank, (300_000,))
    dist.all_reduce(tensor)
    return tensor


@step
def all_reduce_futures(rank, size):
    work = dist.all_reduce(data(rank, (6,)), async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    return doubled.wait()


@step
def all_reduce_coalesced(rank, size):
    tensors = [data(rank + i, (n,)) for i, n in enumerate((3, 1, 5))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_reduce_coalesced(tensors)
    return tensors


@step
def all_reduce_sparse(rank, size):
    indices = torch.tensor([[0, 2 + rank, 2 + rank]])
    tensor = torch.sparse_coo_tensor(indices, data(rank, (3, 2)), (6, 2), check_invariants=True)
    dist.all_reduce(tensor)
    return tensor.to_dense()


@step
def reduce(rank, size):
    tensors = [data(rank, (7,), dtype) for dtype in FLOATS + INTEGERS]
    for tensor in tensors:
        dist.reduce(tensor, size - 1)
    return tensors if rank == size - 1 else None  # what the others are left with is not said


@step
def reduce_scatter(rank, size):
    output = torch.empty(3, 2)
    dist.reduce_scatter(output, [data(10 * rank + r, (3, 2)) for r in range(size)])
    return output


@step
def reduce_scatter_complex(rank, size):
    def numbers(seed, *shape):
        return torch.complex(data(seed, shape), data(seed + 7, shape))

    one, list_of_one, average = (torch.empty(3, 2, dtype=torch.complex64) for _ in range(3))
    dist.reduce_scatter_tensor(one, numbers(rank, 3 * size, 2))
    dist.reduce_scatter(list_of_one, [numbers(10 * rank + r, 3, 2) for r in range(size)])
    dist.reduce_scatter_tensor(average, numbers(rank, 3 * size, 2), dist.ReduceOp.AVG)
    return one, list_of_one, average


@step
def reduce_scatter_tensor(rank, size):
    outputs = [torch.empty(3, dtype=dtype) for dtype in FLOATS + INTEGERS]
    for output in outputs:
        dist.reduce_scatter_tensor(output, data(rank, (3 * size,), output.dtype))
    last = torch.empty(3)
    dist.reduce_scatter_tensor(last, data(rank, (3 * size,)), async_op=True).wait()
    return outputs, last


# --- movement ---


@step
def broadcast(rank, size):
    tensors = [data(rank, (9,), dtype) for dtype in FLOATS + INTEGERS]
    for tensor in tensors:
        dist.broadcast(tensor, src=1)
    last = data(rank, (9,))
    dist.broadcast(last, src=0, async_op=True).wait()
    return tensors, last


@step
def broadcast_wide_types(rank, size):
    tensors = [data(rank, (9,)).to(dtype) for dtype in (torch.bool, torch.float8_e4m3fn, torch.int16)]
    for tensor in tensors:
        dist.broadcast(tensor, src=0)
        assert torch.equal(tensor.view(torch.uint8), data(0, (9,)).to(tensor.dtype).view(torch.uint8)), tensor.dtype
    return tensors


@step
def all_gather(rank, size):
    outputs = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(outputs, data(rank, (2, 3)))
    later = [torch.empty(2, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(later, data(rank, (2,), torch.int64), async_op=True).wait()
    return outputs, later


@step
def all_gather_uneven(rank, size):
    outputs = [torch.empty(r + 1, 2) for r in range(size)]
    dist.all_gather(outputs, data(rank, (rank + 1, 2)))
    assert all(torch.equal(output, data(r, (r + 1, 2))) for r, output in enumerate(outputs))
    return outputs


@step
def all_gather_into_tensor(rank, size):
    outputs = [torch.empty(3 * size, dtype=dtype) for dtype in FLOATS + INTEGERS]
    for output in outputs:
        dist.all_gather_into_tensor(output, data(rank, (3,), output.dtype))
    return outputs


@step
def gather(rank, size):
    outputs = [torch.empty(2, 2) for _ in range(size)] if rank == 1 else None
    dist.gather(data(rank, (2, 2)), outputs, dst=1)
    return outputs


@step
def scatter(rank, size):
    output = torch.empty(3)
    dist.scatter(output, [data(50 + r, (3,)) for r in range(size)] if rank == 1 else None, src=1)
    return output


@step
def all_to_all(rank, size):
    outputs = [torch.empty(rank + 1, 2) for _ in range(size)]
    dist.all_to_all(outputs, [data(10 * rank + r, (r + 1, 2)) for r in range(size)])
    assert all(torch.equal(output, data(10 * r + rank, (rank + 1, 2))) for r, output in enumerate(outputs))
    return outputs


@step
def all_to_all_single(rank, size):
    even, uneven = torch.empty(2 * size), torch.empty(size * (rank + 1), 2)
    dist.all_to_all_single(even, data(rank, (2 * size,)))
    pieces = [r + 1 for r in range(size)]
    dist.all_to_all_single(uneven, data(rank, (sum(pieces), 2)), [rank + 1] * size, pieces)
    return even, uneven


@step
def coalescing_manager(rank, size):
    from torch.distributed.distributed_c10d import _coalescing_manager

    tensors = [data(rank + i, (n,)) for i, n in enumerate((3, 5))]
    with _coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    return tensors


# --- point to point ---


@step
def send_recv(rank, size):
    received = torch.zeros(5)
    if rank == 0:
        dist.send(data(0, (5,)), 1, tag=3)
    elif rank == 1:
        dist.recv(received, 0, tag=3)
    return received


@step
def isend_irecv(rank, size):
    received = torch.empty(5)
    works = [dist.isend(data(rank, (5,)), (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
    for work in works:
        work.wait()
    return received


@step
def recv_any_source(rank, size):
    if rank:
        dist.send(torch.tensor([rank * 11]), 0)
        return None
    received = [torch.empty(1, dtype=torch.int64) for _ in range(size - 1)]
    return sorted((dist.recv(tensor), tensor.item()) for tensor in received)


@step
def batch_isend_irecv(rank, size):
    outputs = [torch.empty(n) for n in (2, 3)]
    operations = [dist.P2POp(dist.isend, data(rank, (n,)), (rank + 1) % size) for n in (2, 3)]
    operations += [dist.P2POp(dist.irecv, output, (rank - 1) % size) for output in outputs]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return outputs


# --- objects and barriers ---


@step
def all_gather_object(rank, size):
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    return gathered


@step
def broadcast_object_list(rank, size):
    objects = ["a", {1: 2}] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, src=0)
    return objects


@step
def gather_object(rank, size):
    collected = [None] * size if rank == 0 else None
    dist.gather_object((rank, "z" * rank), collected, dst=0)
    return collected


@step
def scatter_object_list(rank, size):
    mine = [None]
    dist.scatter_object_list(mine, [[r] * r for r in range(size)] if rank == 0 else None, src=0)
    return mine


@step
def send_object_list(rank, size):
    received = [None]
    if rank == 0:
        dist.send_object_list([{"k": 1}], dst=1)
    elif rank == 1:
        dist.recv_object_list(received, src=0)
    return received


@step
def barrier(rank, size):
    dist.barrier()
    dist.barrier(async_op=True).wait()


@step
def monitored_barrier(rank, size):
    dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)


# --- groups ---


@step
def new_group(rank, size):
    groups = [dist.new_group([r]) for r in range(size)] + [dist.new_group(list(range(size)))]
    sums = []
    for group in (groups[rank], groups[-1]):
        tensor = torch.tensor([rank + 1])
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.item())
    outside = dist.get_rank(groups[(rank + 1) % size])
    dist.destroy_process_group(groups[rank])
    return sums, outside, dist.get_process_group_ranks(groups[-1])


@step
def new_subgroups(rank, size):
    mine, every = dist.new_subgroups(1)
    return mine.size(), len(every), dist.get_process_group_ranks(mine)


@step
def split_group(rank, size):
    # As init_process_group(device_id=...) on a GPU: torch splits bound groups only, of the accelerator's backend.
    cpu = torch.device("cpu", 0)
    dist.group.WORLD.bound_device_id = cpu
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda *args: cpu
    whole = dist.split_group(split_ranks=[list(range(size))])
    tensor = data(rank, (3,))
    dist.all_reduce(tensor, group=whole)
    assert torch.equal(tensor, sum(data(r, (3,)) for r in range(size)))
    return tensor


@step
def device_mesh(rank, size):
    mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    sums = []
    for name in ("dp", "tp"):
        tensor = torch.tensor([rank + 1])
        dist.all_reduce(tensor, group=mesh[name].get_group())
        sums.append(tensor.item())
    return sums, mesh.get_coordinate(), mesh["tp"].mesh.tolist()


# --- functional collectives and tensors over meshes ---


@step
def functional_collectives(rank, size):
    from torch.distributed import _functional_collectives as functional

    mesh, ones = dist.init_device_mesh("cpu", (size,)), data(rank, (2 * size,))
    return [
        functional.all_reduce(ones, "sum", mesh),
        functional.reduce_scatter_tensor(ones, "sum", 0, mesh),
        functional.all_gather_tensor(ones, 0, mesh),
        functional.all_to_all_single(ones, None, None, mesh),
        functional.broadcast(ones, 0, mesh),
    ]


@step
def functional_coalesced(rank, size):
    from torch.distributed import _functional_collectives as functional

    mesh, pair = dist.init_device_mesh("cpu", (size,)), [data(rank, (2 * size,)), data(rank + 1, (size,))]
    return [
        *functional.all_reduce_coalesced(pair, "sum", mesh),
        *functional.all_gather_into_tensor_coalesced(pair, mesh),
        *functional.reduce_scatter_tensor_coalesced(pair, "sum", [0, 0], mesh),
    ]


@step
def differentiable_collectives(rank, size):
    from torch.distributed.nn import functional

    tensor = data(rank, (4,)).requires_grad_()
    (functional.all_reduce(tensor) * data(rank + 3, (4,))).sum().backward()
    return tensor.grad


@step
def dtensor(rank, size):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh, whole = dist.init_device_mesh("cpu", (size,)), torch.arange(5.0 * 3).reshape(5, 3)  # uneven rows
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    total = DTensor.from_local(data(rank, (4,)), mesh, [Partial()])
    return [
        rows.to_local(),
        rows.full_tensor(),
        rows.redistribute(mesh, [Shard(1)]).to_local(),
        total.redistribute(mesh, [Replicate()]).to_local(),
        total.redistribute(mesh, [Shard(0)]).to_local(),
        (rows @ torch.distributed.tensor.distribute_tensor(whole.t().contiguous(), mesh, [Replicate()])).full_tensor(),
    ]


@step
def tensor_parallel(rank, size):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = make_model(), dist.init_device_mesh("cpu", (size,))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    output = model(batch(0)[0])
    output.sum().backward()
    return output.detach(), [parameter.grad.full_tensor() for parameter in model.parameters()]


# --- training ---


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))


def batch(number):
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


def train(model, rank, size, optimizer=None):
    """The losses of three steps on this rank's part of each batch."""
    optimizer, losses = optimizer or torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in range(3):
        inputs, targets = (tensor.chunk(size)[rank] for tensor in batch(number))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


@step
def ddp(rank, size):
    model = nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=0.0005)  # several buckets
    return train(model, rank, size), weights(model)


@step
def ddp_hook(rank, size):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = nn.parallel.DistributedDataParallel(make_model())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model, rank, size), weights(model)


@step
def ddp_sparse(rank, size):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Embedding(20, 4, sparse=True))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in range(3):
        optimizer.zero_grad()
        loss = model(torch.arange(4 + rank) + number).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights(model)


@step
def ddp_join(rank, size):
    """Ranks with other numbers of batches."""
    from torch.distributed.algorithms.join import Join

    model = nn.parallel.DistributedDataParallel(make_model())
    with Join([model]):
        for number in range(2 + rank):
            model(batch(number)[0]).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@step
def zero_optimizer(rank, size):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return train(model, rank, size, optimizer), weights(model)


@step
def fsdp2(rank, size):
    from torch.distributed.fsdp import fully_shard

    model, mesh = make_model(), dist.init_device_mesh("cpu", (size,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, rank, size), weights(model)


@step
def checkpoint(rank, size):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    names = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(names, src=0)
    model, fresh = (fully_shard(make_model(), mesh=dist.init_device_mesh("cpu", (size,))) for _ in range(2))
    losses = train(model, rank, size)
    dcp.save(model.state_dict(), checkpoint_id=names[0])
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=names[0])
    fresh.load_state_dict(state)
    return losses, weights(fresh)


def pipeline(schedule_class, rank, size):
    from torch.distributed.pipelining import PipelineStage

    layers, (inputs, targets) = list(make_model()), batch(0)
    module = nn.Sequential(*(layers[1:] if rank else layers[:1]))
    stage = PipelineStage(module, rank, size, CPU)
    schedule = schedule_class(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    losses = []
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets, losses=losses)
    return losses, [parameter.grad for parameter in module.parameters()]


@step
def pipeline_gpipe(rank, size):
    from torch.distributed.pipelining import ScheduleGPipe

    return pipeline(ScheduleGPipe, rank, size)


@step
def pipeline_1f1b(rank, size):
    from torch.distributed.pipelining import Schedule1F1B

    return pipeline(Schedule1F1B, rank, size)


# --- the group's life ---


@step
def destroy_and_init_again(rank, size):
    """With the same store and the same names."""
    backend, store, sums = dist.get_backend(), dist.distributed_c10d._get_default_store(), []
    for _ in range(2):
        dist.destroy_process_group()
        dist.init_process_group(backend, store=dist.PrefixStore("again", store), rank=rank, world_size=size)
        tensor = data(rank, (3,))
        dist.all_reduce(tensor)
        sums.append(tensor)
    return sums
