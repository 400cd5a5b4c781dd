"""Every collective and point-to-point form of torch.distributed, against results computed on one rank."""

import os

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch_ranks import init, run_ranks  # noqa: E402

from holmes_comm import errors  # noqa: E402

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
]  # fmt: skip
INTEGERS = [dtype for dtype in DTYPES if not dtype.is_floating_point]


def data(rank, shape, dtype=torch.float32):
    """Small integers, exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def check_reductions(rank, size):
    folds = {
        dist.ReduceOp.SUM: (torch.add, DTYPES),
        dist.ReduceOp.PRODUCT: (torch.mul, DTYPES),
        dist.ReduceOp.MIN: (torch.minimum, DTYPES),
        dist.ReduceOp.MAX: (torch.maximum, DTYPES),
        dist.ReduceOp.BAND: (torch.bitwise_and, INTEGERS),
        dist.ReduceOp.BOR: (torch.bitwise_or, INTEGERS),
        dist.ReduceOp.BXOR: (torch.bitwise_xor, INTEGERS),
    }
    for op, (fold, dtypes) in folds.items():
        for dtype in dtypes:
            parts = [data(r, (13,), dtype) for r in range(size)]
            expected = parts[0]
            for part in parts[1:]:
                expected = fold(expected, part)
            mine = parts[rank].clone()
            dist.all_reduce(mine, op)
            assert torch.equal(mine, expected), (op, dtype)
    mine = data(rank, (5,))
    dist.all_reduce(mine, dist.ReduceOp.AVG)
    torch.testing.assert_close(mine, sum(data(r, (5,)) for r in range(size)) / size)
    flags = torch.tensor([rank == 0, False, True])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    assert flags.tolist() == [True, False, True]
    numbers = torch.full((3,), 1 + 2j)
    dist.all_reduce(numbers)  # torch reduces the real view
    assert torch.equal(numbers, torch.full((3,), (1 + 2j) * size))
    numbers = torch.full((3, 2), 1 + 2j, dtype=torch.complex128).t()
    dist.reduce(numbers, 0)
    assert torch.equal(numbers, torch.full((2, 3), (1 + 2j) * (1 if rank else size), dtype=torch.complex128))
    mine = data(rank, (7,))
    dist.reduce(mine, size - 1)
    assert torch.equal(mine, sum(data(r, (7,)) for r in range(size)) if rank == size - 1 else data(rank, (7,)))


def check_reduce_scatter(rank, size):
    inputs = [data(10 * rank + r, (3, 2)) for r in range(size)]
    expected = sum(data(10 * r + rank, (3, 2)) for r in range(size))
    for output in (torch.empty(3, 2), torch.empty(2, 3).t()):
        dist.reduce_scatter(output, inputs)
        assert torch.equal(output, expected)
    output = torch.empty(3, 2)
    work = dist.reduce_scatter_tensor(output, torch.cat(inputs), async_op=True)
    work.wait()
    assert torch.equal(output, expected)
    # Complex numbers that are conjugated when they are read, and negative ones.
    whole = (1 + 2j) * torch.arange(2.0 * size)
    one, listed = (torch.empty(2, dtype=whole.dtype) for _ in range(2))
    for result, call in (
        (one, lambda: dist.reduce_scatter_tensor(one, whole.conj(), async_op=True)),
        (listed, lambda: dist.reduce_scatter(listed, list(whole.conj().chunk(size)), async_op=True)),
    ):
        work = call()
        work.wait()
        assert torch.equal(result, size * whole[2 * rank : 2 * rank + 2].conj())
        (told,) = work.get_future().value()
        assert told.dtype == whole.dtype
        assert told.data_ptr() == result.data_ptr()
    imaginary = whole.conj().imag  # is_neg
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, imaginary)
    assert torch.equal(part, size * imaginary[2 * rank : 2 * rank + 2])


def check_gathers(rank, size):
    every = [data(r, (r + 1, 2)) for r in range(size)]  # uneven
    outputs = [torch.empty_like(part) for part in every]
    dist.all_gather(outputs, every[rank])
    assert all(map(torch.equal, outputs, every))
    strided = [torch.empty(4, 3).t() for _ in range(size)]
    dist.all_gather(strided, data(rank, (4, 3)).t())
    assert all(torch.equal(strided[r], data(r, (4, 3)).t()) for r in range(size))
    for dtype in (*DTYPES, torch.bool, torch.complex64, torch.float8_e4m3fn):
        output = torch.empty(size * 3, dtype=dtype)
        dist.all_gather_into_tensor(output, data(rank, (3,)).to(dtype))
        expected = torch.cat([data(r, (3,)) for r in range(size)]).to(dtype)
        assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8)), dtype
    root = size - 1
    outputs = [torch.empty(2, 2) for _ in range(size)] if rank == root else None
    dist.gather(data(rank, (2, 2)), outputs, dst=root)
    assert rank != root or all(torch.equal(outputs[r], data(r, (2, 2))) for r in range(size))
    output = torch.empty(3)
    dist.scatter(output, [data(50 + r, (3,)) for r in range(size)] if rank == root else None, src=root)
    assert torch.equal(output, data(50 + rank, (3,)))


def check_broadcast(rank, size):
    for dtype in (*DTYPES, torch.bool, torch.complex64, torch.float8_e5m2):
        expected = data(1, (9,)).to(dtype)
        tensor = expected.clone() if rank == 1 else torch.zeros(9, dtype=dtype)
        dist.broadcast(tensor, src=1)
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)), dtype
    strided = data(rank, (4, 3)).t()
    dist.broadcast(strided, src=0)
    assert torch.equal(strided, data(0, (4, 3)).t())


def check_all_to_all(rank, size):
    inputs = [data(10 * rank + r, (r + 1, 2)) for r in range(size)]
    outputs = [torch.empty(rank + 1, 2) for _ in range(size)]
    expected = [data(10 * r + rank, (rank + 1, 2)) for r in range(size)]
    dist.all_to_all(outputs, inputs)
    assert all(map(torch.equal, outputs, expected))
    output = torch.empty(size * (rank + 1), 2)
    dist.all_to_all_single(output, torch.cat(inputs), [rank + 1] * size, [r + 1 for r in range(size)])
    assert torch.equal(output, torch.cat(expected))
    output = torch.empty(size, dtype=torch.int64)
    dist.all_to_all_single(output, torch.arange(size) + 10 * rank)
    assert output.tolist() == [10 * r + rank for r in range(size)]


def check_coalesced(rank, size):
    from torch.distributed.distributed_c10d import _coalescing_manager

    tensors = [data(rank, (n,)) for n in (3, 0, 5)]
    with _coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(torch.equal(t, sum(data(r, t.shape) for r in range(size))) for t in tensors)
    gathered = [torch.empty(size * n) for n in (2, 4)]
    scattered = [torch.empty(n) for n in (2, 4)]
    with _coalescing_manager():
        for n, output in zip((2, 4), gathered, strict=True):
            dist.all_gather_into_tensor(output, data(rank, (n,)))
    with _coalescing_manager():
        for whole, output in zip(gathered, scattered, strict=True):
            dist.reduce_scatter_tensor(output, whole)
    for n, whole, part in zip((2, 4), gathered, scattered, strict=True):
        assert torch.equal(whole, torch.cat([data(r, (n,)) for r in range(size)]))
        assert torch.equal(part, size * data(rank, (n,)))
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:  # no fast path: in order
        first, second = data(rank, (4,)), data(rank, (4,))
        dist.broadcast(first, src=0, async_op=True)
        dist.broadcast(second, src=1, async_op=True)
    manager.wait()
    assert torch.equal(first, data(0, (4,)))
    assert torch.equal(second, data(1, (4,)))


def check_point_to_point(rank, size):
    to, source = (rank + 1) % size, (rank - 1) % size
    requests = [dist.isend(data(rank, (5,)), to, tag=3), dist.irecv(received := torch.empty(5), source, tag=3)]
    for request in requests:
        request.wait()
    assert torch.equal(received, data(source, (5,)))
    outputs = [torch.empty(n) for n in (2, 3)]
    operations = [dist.P2POp(dist.isend, data(rank, (n,)), to) for n in (2, 3)]
    operations += [dist.P2POp(dist.irecv, output, source) for output in outputs]
    works = dist.batch_isend_irecv(operations)
    for work in works:
        work.wait()
    assert all(torch.equal(o, data(source, o.shape)) for o in outputs)
    if "HOLMES_WIDE_MIN_RANKS" in os.environ:
        with pytest.raises(errors.UsageError, match="is wide: its ranks are not all connected"):
            dist.recv(torch.empty(1))
    elif rank == 0:
        seen = set()
        for _ in range(size - 1):
            message = torch.empty(1, dtype=torch.int64)
            sender = dist.recv(message)
            assert message.item() == sender * 11
            seen.add(sender)
        assert seen == set(range(1, size))
    else:
        dist.send(torch.tensor([rank * 11]), 0)
    if rank < 2:
        wide = torch.zeros(4, 3).t()
        dist.send(data(0, (4, 3)).t(), 1) if rank == 0 else dist.recv(wide, 0)
        assert rank == 0 or torch.equal(wide, data(0, (4, 3)).t())


def check_objects(rank, size):
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert [g["rank"] for g in gathered] == list(range(size))
    objects = ["a", {1: 2}] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, src=0)
    assert objects == ["a", {1: 2}]
    collected = [None] * size if rank == 0 else None
    dist.gather_object((rank, "z" * rank), collected, dst=0)
    assert rank != 0 or collected == [(r, "z" * r) for r in range(size)]
    mine = [None]
    dist.scatter_object_list(mine, [[r] * r for r in range(size)] if rank == 0 else None, src=0)
    assert mine == [[rank] * rank]
    if rank == 0:
        dist.send_object_list([{"k": 1}], dst=1)
    elif rank == 1:
        received = [None]
        dist.recv_object_list(received, src=0)
        assert received == [{"k": 1}]


def check_work(rank, size):
    tensor = data(rank, (1000,))
    expected = sum(data(r, (1000,)) for r in range(size))
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert torch.equal(doubled.wait(), expected * 2)
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert torch.equal(work.result()[0], expected)
    strided = data(rank, (4, 3)).t()
    work = dist.all_reduce(strided, async_op=True)
    assert torch.equal(work.get_future().wait()[0], sum(data(r, (4, 3)).t() for r in range(size)))
    # A callback that waits for another collective of the same group does not stop the engine.
    first, second = torch.ones(3), torch.ones(3)

    def nested(future):
        return dist.all_reduce(second, async_op=True).get_future().wait()[0] + future.value()[0]

    chained = dist.all_reduce(first, async_op=True).get_future().then(nested)
    assert chained.wait().tolist() == [2 * size] * 3
    dist.barrier()
    dist.barrier(async_op=True).wait()
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(3))
    assert any(event.name == "holmes:all_reduce" for event in profile.events())


def check_refusals(rank, size):
    group = dist.group.WORLD
    before = torch.ones(3)
    with pytest.raises(errors.UsageError, match="Float8_e4m3fn"):
        dist.all_reduce(torch.zeros(3, dtype=torch.float8_e4m3fn))
    with pytest.raises(errors.UsageError, match="avg"):
        dist.all_reduce(torch.zeros(3, dtype=torch.int32), dist.ReduceOp.AVG)
    with pytest.raises(errors.UsageError, match="PREMUL_SUM"):
        dist.all_reduce(before, dist._make_nccl_premul_sum(2.0))
    with pytest.raises(errors.UsageError, match="bor"):
        dist.all_reduce(before, dist.ReduceOp.BOR)
    with pytest.raises(errors.UsageError, match=f"one per rank, {size}"):
        group.allgather([[torch.empty(3)]], [before])
    with pytest.raises(errors.UsageError, match="elements"):
        dist.reduce_scatter_tensor(torch.empty(1), torch.ones(size + 1))
    with pytest.raises(errors.UsageError, match="split sizes"):
        dist.all_to_all_single(torch.empty(size), torch.ones(size), [1] * size, [2] * size)
    cpu_backend = group._get_backend(torch.device("cpu"))
    with pytest.raises(errors.UsageError, match="on device meta"):
        cpu_backend.allreduce([torch.empty(3, device="meta")])
    with pytest.raises(errors.UsageError, match="layout Sparse"):
        cpu_backend.broadcast([torch.eye(3).to_sparse()])
    with pytest.raises((RuntimeError, ValueError)):
        dist.broadcast(torch.eye(3).to_sparse(), 0)
    dist.all_reduce(before)  # refusals leave the group usable
    assert before.tolist() == [size] * 3


def all_checks(rank, size, store):
    init(store, rank, size)
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check(rank, size)
            except Exception as error:
                error.add_note(f"in {name}") if hasattr(error, "add_note") else None
                raise
    return dist.get_backend()


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(size):
    assert run_ranks(all_checks, size) == ["holmes"] * size


def test_collectives_of_a_wide_group(monkeypatch):
    monkeypatch.setenv("HOLMES_WIDE_MIN_RANKS", "4")
    assert run_ranks(all_checks, 5) == ["holmes"] * 5


def single(rank, size, store):
    init(store, rank, size)
    tensor = torch.arange(3.0)
    dist.all_reduce(tensor)
    gathered = [None]
    dist.all_gather_object(gathered, "me")
    dist.barrier()
    return tensor.tolist(), gathered


def test_one_rank():
    assert run_ranks(single, 1) == [([0.0, 1.0, 2.0], ["me"])]
