"""Tensors that are not plain memory through torch.distributed: refused with the fix; sparse ones reduced as by Gloo."""

import threading

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch_ranks import init, run_ranks  # noqa: E402

from holmes_comm import errors  # noqa: E402


def backend():
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def refused(pattern, call):
    with pytest.raises(errors.UsageError, match=pattern):
        call()


def freed(nbytes=0, make=lambda tensor: tensor):
    tensor = make(torch.ones(1 << 16))
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(4)


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(str(function))


def in_vmap():
    seen = []
    torch.vmap(lambda x: (seen.append(x), x)[1])(torch.ones(2, 4))
    return seen[0]


# --- refused ---
REFUSED = {
    "freed": (freed, "storage of the tensor .* holds 0 of the 262144 bytes"),
    "shrunk": (lambda: freed(8), "holds 8 of the 262144 bytes"),
    "freed, not contiguous": (lambda: freed(1024, lambda t: t.view(256, 256).t()), "holds 1024 of the 262144 bytes"),
    "fake": (fake, "device|no memory of its own"),
    "wrapper subclass": (lambda: Wrapper(torch.ones(4)), "no memory of its own"),
    "in vmap": (in_vmap, "no memory of its own|has no memory"),
    "zero tensor": (lambda: torch._efficientzerotensor(4), "no memory of its own"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(4)), "no memory of its own"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8), "quantized.*int_repr"),
    "CSR": (lambda: torch.eye(4).to_sparse_csr(), r"layout SparseCsr .*to_dense\(\)"),
    "mkldnn": (lambda: torch.ones(4, 4).to_mkldnn(), r"layout Mkldnn .*to_dense\(\)"),
    "meta": (lambda: torch.empty(4, device="meta"), "device meta"),
}


def in_inference_mode(rank, size, store):
    """Whoever waits for it, wherever: the future is set by a thread of its own, and work is waited for outside."""
    init(store, rank, size)

    def strided():
        return torch.full((600, 600), rank + 1.0).t()

    with torch.inference_mode():
        tensors = [strided() for _ in range(4)]
        by_future, by_work = (dist.broadcast(tensor, 0, async_op=True) for tensor in tensors[:2])
        by_future.get_future().wait()
    by_work.wait()
    dist.broadcast(tensors[2], 0)
    by_thread = dist.broadcast(tensors[3], 0, async_op=True)
    thread = threading.Thread(target=by_thread.wait)
    thread.start()
    thread.join()
    for tensor in tensors:
        assert (tensor == 1).all()
    outer = strided()
    with torch.inference_mode():
        dist.broadcast(outer, 0)
    assert (outer == 1).all()


def test_tensors_of_inference_mode():
    run_ranks(in_inference_mode, 2)


def check_refused(rank, size, store):
    init(store, rank, size)
    plain, group = torch.ones(8), backend()
    for name, (make, pattern) in REFUSED.items():
        tensor = make()
        try:
            refused(pattern, lambda t=tensor: group.allreduce([t]))
            refused(pattern, lambda t=tensor: group.broadcast([t]))
            refused(pattern, lambda t=tensor: group._allgather_base(t, plain))
            refused(pattern, lambda t=tensor: group.send([t], 1 - rank, 0))
        except BaseException as error:
            raise AssertionError(name) from error
    # Through torch's own functions, which do without us for a FakeTensor and refuse some of the rest themselves.
    for make in (freed, lambda: freed(8)):
        refused("storage of the tensor", lambda make=make: dist.all_reduce(make()))
        refused("storage of the tensor", lambda make=make: dist.broadcast(make(), 0))
        refused("storage of the tensor", lambda make=make: dist.all_gather([torch.empty(1), make()], torch.ones(1)))
        refused("storage of the tensor", lambda make=make: dist.isend(make(), 1 - rank))
        refused("storage of the tensor", lambda make=make: dist.reduce_scatter_tensor(torch.ones(1 << 15), make()))
    for make in (lambda: Wrapper(torch.ones(4)), in_vmap, lambda: torch._efficientzerotensor(4)):
        with pytest.raises((RuntimeError, NotImplementedError, errors.UsageError)):
            dist.all_reduce(make())
    refused("elements share memory.*contiguous", lambda: dist.all_reduce(torch.ones(1).expand(4)))
    refused("share memory", lambda: dist.all_gather([plain, plain], torch.ones(8)))
    refused("share memory", lambda: dist.all_gather_into_tensor(plain, plain[2:6]))
    # Read, an expanded or lazily negated tensor is what it stands for.
    gathered = torch.empty(8)
    dist.all_gather_into_tensor(gathered, torch.full((1,), rank + 1.0).expand(4))
    assert gathered.tolist() == [1] * 4 + [2] * 4
    dist.all_gather_into_tensor(gathered, torch._neg_view(torch.full((4,), rank + 1.0)))
    assert gathered.tolist() == [-1] * 4 + [-2] * 4
    negative = torch.full((4,), rank + 1.0)
    group.allreduce([torch._neg_view(negative)]).wait()  # torch's own functions give a copy of it to every backend
    assert negative.tolist() == [3] * 4
    for splits in ([2**62] * 2, [2**62] * 4, [2**63 - 1, 1], [-1, 9], [9, -1], [8]):
        refused("split size", lambda s=splits: dist.all_to_all_single(gathered, plain, s, [4, 4]))
        refused("split size", lambda s=splits: dist.all_to_all_single(gathered, plain, [4, 4], s))
    dist.all_reduce(plain)
    assert plain.tolist() == [2] * 8


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_memory_are_refused():
    run_ranks(check_refused, 2)


# --- sparse all_reduce ---
def sparse(rank, dtype=torch.float32, shape=(50, 3), sparse_dims=1, elements=None):
    """Repeated indices, others on each rank; values exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    count = 7 * rank % 20 if elements is None else elements  # none on rank 0
    indices = torch.stack([torch.randint(n, (count,), generator=generator) for n in shape[:sparse_dims]])
    values = torch.randint(0, 4, (count, *shape[sparse_dims:]), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def check_sum(rank, size, **options):
    mine = sparse(rank, **options)
    assert dist.all_reduce(mine) is None
    expected = sum(sparse(r, **options).to_dense().double() for r in range(size))
    assert mine.is_coalesced()
    assert torch.equal(mine.to_dense().double(), expected), options
    return mine


SHAPES = [((50, 3), 1), ((4, 5), 2), ((9,), 1), ((3, 4, 5), 2), ((6, 0), 1)]


def check_sparse(rank, size, store):
    init(store, rank, size)
    for shape, sparse_dims in SHAPES:
        check_sum(rank, size, shape=shape, sparse_dims=sparse_dims)
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.uint8):
        assert check_sum(rank, size, dtype=dtype).dtype == dtype
    check_sum(rank, size, elements=0)
    mine = sparse(rank)
    dist.all_reduce(mine, dist.ReduceOp.AVG)
    torch.testing.assert_close(mine.to_dense(), sum(sparse(r).to_dense() for r in range(size)) / size)
    gradient = torch._neg_view(sparse(rank)._values().clone())
    mine = torch.sparse_coo_tensor(sparse(rank)._indices(), gradient, (50, 3))
    dist.all_reduce(mine)
    assert torch.equal(mine.to_dense(), -sum(sparse(r).to_dense() for r in range(size)))
    check_sparse_async(rank, size)
    check_sparse_refusals(rank, size)
    connections = backend().connections()
    assert any(one["sent_bytes"] for one in connections)


def check_sparse_async(rank, size):
    """In bulk, between other operations, with nothing of the caller's left to hold the operands."""
    works, tensors = [], []
    for step in range(6):
        tensors.append(sparse(rank, elements=step * (rank + 1)))
        works.append(dist.all_reduce(tensors[-1], async_op=True))
        dense = torch.full((5,), float(rank))
        dist.all_reduce(dense)  # another order of completion than of calls
        assert dense.tolist() == [size * (size - 1) / 2] * 5
        dist.all_reduce(sparse(rank), async_op=True)  # dropped at once
    doubled = works[1].get_future().then(lambda future: future.value()[0].to_dense() * 2)
    for step in reversed(range(6)):
        works[step].wait()
        assert works[step].is_completed()
        expected = sum(sparse(r, elements=step * (r + 1)).to_dense() for r in range(size))
        assert torch.equal(tensors[step].to_dense(), expected)
    assert torch.equal(doubled.wait(), 2 * tensors[1].to_dense())
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        mine = sparse(rank)
        dist.broadcast(torch.ones(3), 0, async_op=True)
        backend().allreduce([mine])
    manager.wait()
    assert torch.equal(mine.to_dense(), sum(sparse(r).to_dense() for r in range(size)))


def check_sparse_refusals(rank, size):
    refused("'max' is not supported.*SUM or AVG", lambda: dist.all_reduce(sparse(rank), dist.ReduceOp.MAX))
    refused("'avg' is not defined for Int", lambda: dist.all_reduce(sparse(rank, torch.int32), dist.ReduceOp.AVG))
    refused("Bool.*cannot be reduced", lambda: dist.all_reduce(sparse(rank, torch.bool)))
    refused("layout Sparse", lambda: backend().broadcast([sparse(rank)]))
    for name, options in {
        "size": {"shape": (50 + (rank == 1), 3)},
        "dtype": {"dtype": torch.float64 if rank == 1 else torch.float32},
        "sparse dimensions": {"shape": (5, 5), "sparse_dims": 1 + (rank == 1)},
    }.items():
        mine = sparse(rank, **options)
        before = mine.to_dense()
        with pytest.raises(errors.MismatchError, match=r"rank 0 has .*rank 1 has .*; give tensors of one size"):
            dist.all_reduce(mine)
        assert torch.equal(mine.to_dense(), before), name
    check_sum(rank, size)  # the group is as it was


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_sparse_all_reduce(size):
    if size == 1:
        run_ranks(check_sparse_alone, 1)
    else:
        run_ranks(check_sparse, size)


def check_sparse_alone(rank, size, store):
    init(store, rank, size)
    assert torch.equal(check_sum(rank, size, elements=9).to_dense(), sparse(rank, elements=9).to_dense())


def check_sparse_and_dense(rank, size, store):
    """One rank's gradient is dense."""
    init(store, rank, size, timeout_s=5.0)
    mine = sparse(rank) if rank == 0 else torch.ones(50, 3)
    with pytest.raises((errors.MismatchError, errors.CommunicatorError)) as caught:
        dist.all_reduce(mine)
    return type(caught.value).__name__


def test_sparse_on_one_rank_and_dense_on_the_other_is_a_mismatch():
    assert "MismatchError" in run_ranks(check_sparse_and_dense, 2)


def check_lost(rank, size, store):
    """A rank that dies while others wait for its elements."""
    import os
    import signal

    init(store, rank, size, timeout_s=20.0)
    check_sum(rank, size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(sparse(rank), async_op=True)
    with pytest.raises(errors.PeerLostError):
        work.wait()
    dist.destroy_process_group()
    return True


def test_sparse_all_reduce_with_a_rank_that_dies():
    assert run_ranks(check_lost, 2, lost=(1,)) == [True, None]


# --- DDP ---
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.EmbeddingBag(40, 8, sparse=True, mode="sum")
        self.letters = torch.nn.Embedding(30, 8, sparse=True)
        self.out = torch.nn.Linear(8, 1)

    def forward(self, words, letters):
        return self.out(self.words(words) + self.letters(letters).sum(1))


def train(rank, size, store, kind):
    init(store, rank, size, backend=kind)
    torch.manual_seed(0)
    # SparseAdam divides by what ranks' parts leave where they cancel out: of float32 that is the rounding of each order
    # of sums, and Gloo's is another one.
    model = torch.nn.parallel.DistributedDataParallel(Model().double())
    sparse_optimizer = torch.optim.SGD(list(model.module.words.parameters()), lr=0.1)
    adam = torch.optim.SparseAdam(list(model.module.letters.parameters()), lr=0.1)
    dense = torch.optim.AdamW(model.module.out.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(5):
        count = 3 + 2 * rank  # other numbers of elements on each rank
        words = torch.randint(40, (count, 4), generator=generator)
        letters = torch.randint(30, (count, 2), generator=generator)
        loss = model(words, letters).square().mean()
        loss.backward()
        assert model.module.words.weight.grad.is_sparse
        for optimizer in (sparse_optimizer, adam, dense):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().tolist() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [2, 4])
def test_ddp_with_sparse_embeddings_equals_gloo(size):
    ours = run_ranks(train, size, "holmes")
    theirs = run_ranks(train, size, "gloo")
    for (losses, parameters), (gloo_losses, gloo_parameters) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(losses, gloo_losses, rtol=1e-11, atol=1e-12)
        for one, other in zip(parameters, gloo_parameters, strict=True):
            values = [torch.tensor(each, dtype=torch.float64) for each in (one, other)]
            torch.testing.assert_close(*values, rtol=1e-11, atol=1e-12)
    assert all(parameters == ours[0][1] for _, parameters in ours)
