"""holmes.DistributedOptimizer against plain torch optimizers on one process: losses, parameters, unusual models."""

import time

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_ranks import init, run_ranks  # noqa: E402

import holmes  # noqa: E402

BATCH, WIDTH, STEPS = 8, 6, 5
SMALL_BUCKETS = {"bucket_bytes": 512}


class Odd(nn.Module):
    """Tied, frozen, unused, scalar, empty and odd-shaped parameters; one used directly by its grandparent."""

    def __init__(self, uses_late=False, checkpointing=None):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 17)
        self.shared = nn.Linear(17, 17, bias=False)
        self.frozen = nn.Linear(17, 17).requires_grad_(False)
        self.never = nn.Linear(3, 5)
        self.late = nn.Linear(17, 17)
        self.attention = nn.MultiheadAttention(17, 1, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.block = nn.Sequential(nn.Linear(17, 33), nn.Tanh(), nn.Linear(33, 17))
        self.last = nn.Linear(17, WIDTH, bias=False)
        self.last.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
        self.tied = nn.Linear(17, 17, bias=False)
        self.tied.weight = self.shared.weight
        self.uses_late, self.checkpointing = uses_late, checkpointing

    def forward(self, x):
        x = torch.tanh(self.first(x)) * self.scale
        x = torch.tanh(self.frozen(self.shared(x)))
        pair = torch.stack([x, x.tanh()], 1)
        x = x + self.attention(pair, pair, pair, need_weights=False)[0][:, 0]
        if self.uses_late:
            x = x + self.late(x)
        if self.checkpointing is None:
            x = x + self.block(x)
        else:
            x = x + checkpoint(self.block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.last(self.tied(x) + self.empty.sum())


def batch(step, shape=(BATCH, WIDTH)):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def decayed(model):
    """Weight decay for matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]


def train(
    model, optimizer, rank, size, *, steps=range(STEPS), micro_batches=1, clip=None, before_step=None, how="count"
):
    """The mean losses of the global batch. `how` micro-batches are told: by the first step's count, or by no_sync."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    losses = []
    for step in steps:
        if before_step is not None:
            before_step(step)
        inputs, targets = (t.chunk(size)[rank] for t in batch(step))
        total = torch.zeros(())
        optimizer.zero_grad()
        parts = list(zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
        for number, (x, y) in enumerate(parts):
            loss = nn.functional.mse_loss(model(x), y) / micro_batches
            scaled = optimizer.scale(loss) if hasattr(optimizer, "scale") else loss
            if how == "no_sync" and number < micro_batches - 1:
                with optimizer.no_sync():
                    scaled.backward()
            else:
                scaled.backward()
            total += loss.detach()
        if clip is not None:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], clip)
        optimizer.step()
        scheduler.step()
        if size > 1:
            dist.all_reduce(total)
        losses.append(total.item() / size)
    return losses


def reference(make, optimizer_class=torch.optim.AdamW, clip=None, params=None, before_step=None, **arguments):
    model = make()
    trained = params(model) if params else [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_class(trained, **arguments)
    losses = train(
        model, optimizer, 0, 1, clip=clip, before_step=before_step and (lambda step: before_step(model, step))
    )
    return losses, [p.detach() for p in model.parameters()]


def check_equal(
    rank, size, make, *, reference_arguments=None, train_arguments=None, params=None, before_step=None, **options
):
    """Trains `make()` over all ranks and compares losses and final parameters with one process."""
    # The large eps keeps gradients that are zero but for rounding (the attention's key bias) from being steps of lr.
    arguments = reference_arguments or {}
    if "optimizer_class" not in arguments:
        arguments = {"optimizer_class": torch.optim.AdamW, "lr": 0.01, "eps": 1e-4, **arguments}
    expected_losses, expected = reference(make, params=params, before_step=before_step, **arguments)
    arguments = dict(arguments)
    clip = arguments.pop("clip", None)
    model = make()
    optimizer = holmes.DistributedOptimizer(
        model,
        arguments.pop("optimizer_class"),
        params=params(model) if params else None,
        max_grad_norm=clip,
        **{**SMALL_BUCKETS, **options},
        **arguments,
    )
    hook = before_step and (lambda step: before_step(model, step))
    losses = train(model, optimizer, rank, size, before_step=hook, **(train_arguments or {}))
    torch.testing.assert_close(losses, expected_losses, rtol=1e-4, atol=0)
    optimizer.synchronize()
    torch.testing.assert_close([p.detach() for p in model.parameters()], expected, rtol=2e-4, atol=2e-6)
    assert len(optimizer._runtime.storages) > 3
    return optimizer


def use_late_sometimes(model, step):
    """A parameter with gradients in some steps only, which plain torch leaves alone in the others."""
    model.uses_late = step in (1, 3)


def check_stages_share_a_norm(rank, size):
    """Two data-parallel groups with different models, clipped by one norm, as pipeline stages are."""
    if size != 4:
        return
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    weights = [torch.full((5,), 3.0), torch.full((7,), 4.0)]  # the gradients: of norm sqrt(5 * 9 + 7 * 16)
    model = nn.ParameterList([nn.Parameter(torch.zeros(5 if rank < 2 else 7))])
    optimizer = holmes.DistributedOptimizer(
        model, torch.optim.SGD, lr=1.0, group=groups[rank // 2], norm_groups=[across[rank % 2]], max_grad_norm=1.0
    )
    for _ in range(2):
        (model[0] * weights[rank // 2]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    norm = (5 * 9 + 7 * 16) ** 0.5
    assert abs(optimizer.grad_norm - norm) < 1e-4
    torch.testing.assert_close(model[0].detach(), -2 * weights[rank // 2] / norm)


def many_equal(rank, size, store, backend):
    init(store, rank, size, backend)
    check_equal(rank, size, Odd)
    check_equal(rank, size, Odd, step_in_backward=False)
    check_equal(rank, size, Odd, before_step=use_late_sometimes)
    check_equal(rank, size, lambda: Odd(uses_late=True), params=decayed)
    for kind in ("reentrant", "not reentrant"):
        check_equal(rank, size, lambda kind=kind: Odd(checkpointing=kind))
    sgd = {"optimizer_class": torch.optim.SGD, "lr": 0.05, "momentum": 0.9, "dampening": 0.1}
    check_equal(rank, size, Odd, reference_arguments=sgd)
    for how in ("count", "no_sync"):
        check_equal(rank, size, Odd, train_arguments={"micro_batches": 2, "how": how})
    clipped = check_equal(rank, size, Odd, reference_arguments={"clip": 0.1})
    assert clipped.grad_norm > 0.1
    check_equal(rank, size, Odd, loss_scale=1024.0)
    check_equal(rank, size, Odd, reduce_dtype=torch.float64, train_arguments={"micro_batches": 2})
    check_stages_share_a_norm(rank, size)
    return True


@pytest.mark.parametrize(("backend", "size"), [("holmes", 2), ("holmes", 4), ("gloo", 2)])
def test_equals_one_process(backend, size):
    assert all(run_ranks(many_equal, size, backend))


def test_alone_without_torch_distributed():
    check_equal(0, 1, Odd)
    check_equal(0, 1, Odd, reference_arguments={"clip": 0.1})


def gather_in_other_ranks(rank, size, store):
    init(store, rank, size)
    alone = [dist.new_group([other]) for other in range(size)][rank]
    with pytest.raises(ValueError, match=rf"gather_group has ranks \[{rank}\], but group has \[0, 1\]"):
        holmes.DistributedOptimizer(nn.Linear(4, 4), torch.optim.SGD, lr=0.1, gather_group=alone)


def test_gathers_of_other_ranks_are_refused():
    run_ranks(gather_in_other_ranks, 2)


def end_without_close(rank, size, store):
    init(store, rank, size)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    optimizer = holmes.DistributedOptimizer(model, torch.optim.SGD, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 256) * (rank + 1)).square().mean().backward()
        optimizer.step()
    if rank:  # the first rank has ended its script by now
        time.sleep(0.5)
        sums = [p.double().sum().item() for p in model.parameters()]
        dist.destroy_process_group()
        return sums
    dist.destroy_process_group()
    return [p.double().sum().item() for p in model.parameters()]


def test_a_script_may_end_after_its_last_step():
    first, *others = run_ranks(end_without_close, 3)
    assert all(other == first for other in others)


class Experts(nn.Module):
    """A layer that every micro-batch uses, and four of which each uses one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, expert):
        return self.experts[expert](torch.tanh(self.shared(x)))


ROUTES = [[0, 1], [0, 0], [2, 2], [1, 3]]  # of each step's two micro-batches


def train_experts(rank, size, store, told):
    init(store, rank, size)
    model, reference = Experts(), Experts()
    optimizer = holmes.DistributedOptimizer(
        model, torch.optim.SGD, lr=0.1, momentum=0.9, bucket_bytes=8, accumulation_steps=2 if told == "count" else None
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step, experts in enumerate(ROUTES):
        if told == "later" and step:
            optimizer.accumulation_steps = 2
        for half, expert in zip(batch(step), experts, strict=True):
            model(half.chunk(size)[rank], expert).square().mean().backward()
            reference(half, expert).square().mean().backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), its.detach())


@pytest.mark.parametrize("told", [None, "count", "later"])
def test_micro_batches_may_use_other_experts_in_each_step(told):
    run_ranks(train_experts, 2, told)


def differ_in_lr(rank, size, store, step_in_backward):
    init(store, rank, size)
    torch.manual_seed(0)
    model = nn.Linear(64, 1, bias=False)
    optimizer = holmes.DistributedOptimizer(
        model, torch.optim.SGD, lr=0.1, momentum=0.9, step_in_backward=step_in_backward
    )

    def step(lr):
        optimizer.param_groups[0]["lr"] = lr
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0.1)
    before = model.weight.detach().clone()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"lr of param_groups\[0\] is 0.1 on rank 0 .* and 0.01 on rank 1"):
            step([0.1, 0.01][rank])
        optimizer.zero_grad()
        assert torch.equal(model.weight, before)
    step([0.12345649999999, 0.1234565000001][rank])  # two machines' arithmetic
    step(0.1)
    return model.weight.detach().numpy()


@pytest.mark.parametrize("step_in_backward", [True, False])
def test_settings_that_differ_between_ranks_are_refused(step_in_backward):
    first, second = run_ranks(differ_in_lr, 2, step_in_backward)
    assert (first == second).all()
