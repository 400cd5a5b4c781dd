"""What trainers build on torch.distributed: DDP, FSDP2, DTensor, functional collectives, pipelining, checkpoints."""

import copy
import resource

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch import nn  # noqa: E402
from torch_ranks import init, run_ranks  # noqa: E402

BATCH, WIDTH, STEPS = 8, 6, 3


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))


def batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def part(tensor, rank, size):
    return tensor.chunk(size)[rank]


def reference():
    """Parameters after STEPS of plain SGD on the whole batch."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(model, rank, size):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(part(inputs, rank, size)), part(targets, rank, size)).backward()
        optimizer.step()


def check_ddp(rank, size, folder):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.0005)  # several buckets
    train(model, rank, size)
    torch.testing.assert_close([p.detach() for p in model.parameters()], reference())
    # Hooks are Python callbacks on the work's future; PowerSGD's wait for further collectives inside.
    hooks = [
        (None, default_hooks.fp16_compress_hook),
        (powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
    ]
    for state, hook in hooks:
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.0005)
        model.register_comm_hook(state, hook)
        train(model, rank, size)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        least, most = weights.clone(), weights.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        assert torch.equal(least, most)  # the same on all ranks


def check_fsdp(rank, size, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    def build():
        model, mesh = make_model(), dist.init_device_mesh("cpu", (size,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    model = build()
    train(model, rank, size)
    torch.testing.assert_close([p.detach().full_tensor() for p in model.parameters()], reference())
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    fresh = build()
    state = get_model_state_dict(fresh)
    dcp.load(state, checkpoint_id=folder)
    fresh.load_state_dict(state)
    torch.testing.assert_close([p.detach().full_tensor() for p in fresh.parameters()], reference())


def check_dtensor(rank, size, folder):
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (size,))
    whole = torch.arange(5.0 * 3).reshape(5, 3)  # uneven rows
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(rows.full_tensor(), whole)
    assert torch.equal(rows.redistribute(mesh, [Shard(1)]).full_tensor(), whole)  # all_to_all
    total = DTensor.from_local(torch.full((4,), float(rank + 1)), mesh, [Partial()])
    expected = torch.full((4,), size * (size + 1) / 2)
    assert torch.equal(total.redistribute(mesh, [Replicate()]).to_local(), expected)
    assert torch.equal(total.redistribute(mesh, [Shard(0)]).full_tensor(), expected)  # reduce_scatter
    assert torch.equal((rows * 2).full_tensor(), whole * 2)
    ones = torch.ones(size * 2)
    assert functional.all_reduce(ones, "avg", mesh).tolist() == ones.tolist()
    assert functional.reduce_scatter_tensor(ones, "sum", 0, mesh).tolist() == [size] * 2
    assert functional.all_gather_tensor(torch.tensor([rank]), 0, mesh).tolist() == list(range(size))
    coalesced = functional.all_gather_into_tensor_coalesced([torch.tensor([rank]), torch.tensor([-rank])], mesh)
    assert [t.tolist() for t in coalesced] == [list(range(size)), [-r for r in range(size)]]
    reduced = functional.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", mesh)
    assert [t.tolist() for t in reduced] == [[size] * 2, [size] * 3]
    scattered = functional.reduce_scatter_tensor_coalesced([ones, 2 * ones], "sum", [0, 0], mesh)
    assert [t.tolist() for t in scattered] == [[size] * 2, [2 * size] * 2]
    swapped = functional.all_to_all_single(torch.arange(size) + 10 * rank, None, None, mesh)
    assert swapped.tolist() == [10 * r + rank for r in range(size)]
    assert functional.broadcast(torch.tensor([rank]), 0, mesh).item() == 0


def check_pipeline(rank, size, folder):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    inputs, targets = batch(0)
    layers = list(make_model())
    share = [layers[:1], layers[1:]] if size == 2 else [[layer] for layer in layers]
    plain = nn.Sequential(*layers)
    expected_loss = nn.functional.mse_loss(plain(inputs), targets)
    expected_loss.backward()
    expected = [p.grad.clone() for layer in share[rank] for p in layer.parameters()]
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        module = nn.Sequential(*share[rank])
        module.zero_grad()
        stage = PipelineStage(module, rank, size, torch.device("cpu"))
        schedule = schedule_class(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        losses = []
        if rank == 0:
            schedule.step(inputs)
        elif rank == size - 1:
            schedule.step(target=targets, losses=losses)
            torch.testing.assert_close(sum(losses) / len(losses), expected_loss.detach())
        else:
            schedule.step()
        torch.testing.assert_close([p.grad for p in module.parameters()], expected)


def all_checks(rank, size, store, folder):
    init(store, rank, size)
    for check in (check_ddp, check_fsdp, check_dtensor, check_pipeline):
        check(rank, size, folder)
    return True


def test_training(tmp_path):
    assert all(run_ranks(all_checks, 2, str(tmp_path)))


def ddp_and_groups(rank, size, store):
    init(store, rank, size)
    check_ddp(rank, size, None)
    halves = [dist.new_group([r for r in range(size) if r % 2 == half]) for half in range(2)]
    most = dist.new_group(list(range(1, size)))
    totals = [torch.ones(100_000) * rank for _ in range(3)]
    works = [
        dist.all_reduce(totals[0], group=halves[rank % 2], async_op=True),
        dist.all_reduce(totals[2], async_op=True),
    ]
    if rank > 0:
        works.append(dist.all_reduce(totals[1], group=most, async_op=True))
    for work in works:
        work.wait()
    # Pairs are connected also while the owner of the store waits for it.
    if rank == 0:
        work = dist.isend(torch.ones(3), 5)
        store.get("5 has received")
        work.wait()
    elif rank == 5:
        dist.recv(torch.empty(3), 0)
        store.set("5 has received", "yes")
    return [total[-1].item() for total in totals]


def test_a_wide_group_trains_and_is_parted(monkeypatch):
    monkeypatch.setenv("HOLMES_WIDE_MIN_RANKS", "4")
    size = 8
    for rank, totals in enumerate(run_ranks(ddp_and_groups, size)):
        assert totals == [12.0 if rank % 2 == 0 else 16.0, 28.0 if rank else 0.0, 28.0]


def shared_buffers():
    with open("/proc/self/maps") as file:
        return len({line.split()[4] for line in file if "memfd:holmes-buffer" in line})


def use_shared_memory(rank, size, store, expected):
    """Where `expected`, what FSDP2 sends lies in shared memory, and is given back; else in ordinary memory."""
    from torch.distributed.fsdp import fully_shard

    init(store, rank, size)
    cpu = torch.device("cpu")
    backend = dist.distributed_c10d._get_default_group()._get_backend(cpu)
    assert backend.supports_tensor_alloc(cpu) == expected
    assert not backend.supports_tensor_alloc(torch.device("cuda", 0))
    before = shared_buffers()
    for dtype, count, is_shared in (
        (torch.float32, 1 << 18, True),
        (torch.bfloat16, 1000, False),
        (torch.int8, 0, False),
    ):
        tensor = backend.allocate_tensor(count, dtype=dtype, device=cpu)
        assert (tensor.shape, tensor.dtype) == ((count,), dtype)
        assert shared_buffers() == before + is_shared
        tensor.fill_(rank + 1)
        dist.all_reduce(tensor)
        assert bool((tensor == size * (size + 1) / 2).all())
    del tensor
    assert shared_buffers() == before

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 600), nn.Linear(600, 600), nn.Linear(600, WIDTH))
    reference = copy.deepcopy(model)
    fully_shard(model)
    model.set_allocate_memory_from_process_group_for_comm(True)
    most, allocate = [before], type(backend).allocate_tensor

    def watched(*args, **options):
        made = allocate(*args, **options)
        most.append(shared_buffers())
        return made

    type(backend).allocate_tensor = watched
    for step in range(2):
        inputs, _ = batch(step)
        model(part(inputs, rank, size)).square().mean().backward()
        reference(inputs).square().mean().backward()
    for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), its.grad)
    assert (max(most) > before) == expected
    # Without a descriptor it is ordinary memory.
    before = shared_buffers()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    allocate(backend, 1 << 18, dtype=torch.float32, device=cpu).fill_(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert shared_buffers() == before
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("expected", [True, False])
def test_what_is_sent_may_lie_in_shared_memory(monkeypatch, expected):
    monkeypatch.setenv("HOLMES_SHM", str(int(expected)))
    run_ranks(use_shared_memory, 2, expected)
