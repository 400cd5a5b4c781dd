"""holmes.DistributedOptimizer over two clusters with what crosses between them compressed."""

import os

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch import nn  # noqa: E402
from torch_ranks import init, run_ranks  # noqa: E402

import holmes  # noqa: E402
from holmes_comm import UsageError  # noqa: E402

SIZE, STEPS, WIDTH = 4, 40, 64


def over_clusters(rank, store):
    os.environ["HOLMES_CLUSTER"] = "ab"[rank // 2]
    os.environ["HOLMES_HIERARCHICAL_MIN_BYTES"] = "0"
    init(store, rank, SIZE)


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, WIDTH))


def batch(step, rank):
    """Of a teacher that all ranks know, so that the loss falls."""
    torch.manual_seed(7)
    teacher = nn.Linear(WIDTH, WIDTH)
    generator = torch.Generator().manual_seed(step * SIZE + rank)
    inputs = torch.randn(16, WIDTH, generator=generator)
    return inputs, teacher(inputs).detach()


def train(rank, size, store, options):
    over_clusters(rank, store)
    model = make()
    optimizer = holmes.DistributedOptimizer(model, torch.optim.AdamW, lr=0.003, bucket_bytes=20_000, **options)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step, rank)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    optimizer.synchronize()
    parameters = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
    others = [torch.empty_like(parameters) for _ in range(size)]
    dist.all_gather(others, parameters)
    optimizer.close()
    return losses, all(bool(torch.equal(other, parameters)) for other in others), parameters.tolist()


@pytest.fixture(scope="module")
def plain():
    return run_ranks(train, SIZE, {})[0]


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"compress_gradients": "int8"}, 0.01),
        ({"compress_gradients": "int4"}, 0.05),
        ({"compress_parameters": "int8"}, 0.01),
        ({"compress_gradients": "bf16", "compress_parameters": "bf16"}, 0.01),
        ({"compress_gradients": "int8", "compress_parameters": "int8", "max_grad_norm": 1e9}, 0.02),
        ({"compress_gradients": "int4", "compress_parameters": "int4"}, 0.1),
    ],
    ids=str,
)
def test_training_goes_as_without(plain, options, most):
    """The same replicas to the bit on all ranks, another rounding than without, and nearly the same losses."""
    ranks = run_ranks(train, SIZE, options)
    losses, is_equal, parameters = ranks[0]
    assert all(rank[1] for rank in ranks)
    assert is_equal
    assert parameters != plain[2]
    assert losses[0] == pytest.approx(plain[0][0], rel=1e-5)
    assert losses[-1] < losses[0] / 4
    assert losses[-1] == pytest.approx(plain[0][-1], rel=most)


def refused(rank, size, store, options, said):
    over_clusters(rank, store)
    model = make().to(options.pop("dtype", torch.float32))
    with pytest.raises(UsageError, match=said):
        holmes.DistributedOptimizer(model, torch.optim.AdamW, lr=0.003, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compress_gradients": "int2"}, "'int2' does not exist; use one of: bf16, int8, int4"),
        ({"compress_gradients": "int8", "dtype": torch.bfloat16}, "here it is bfloat16 on cpu; give reduce_dtype"),
        ({"compress_parameters": "int8", "dtype": torch.bfloat16}, "here it is bfloat16 on cpu; leave it out"),
    ],
    ids=str,
)
def test_what_cannot_be_compressed_is_refused(options, said):
    run_ranks(refused, SIZE, options, said)


def other_backend(rank, size, store):
    init(store, rank, size, backend="gloo")
    with pytest.raises(UsageError, match="is for the backend holmes, not for 'gloo'"):
        holmes.DistributedOptimizer(make(), torch.optim.AdamW, lr=0.003, compress_gradients="int8")


def test_another_backend_is_refused():
    run_ranks(other_backend, 2)
