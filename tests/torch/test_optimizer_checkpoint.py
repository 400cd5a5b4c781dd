"""Mixed precision, loss scaling and checkpoints of holmes.DistributedOptimizer, across numbers of ranks."""

import re

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from test_optimizer import Odd, batch, decayed  # noqa: E402
from torch import nn  # noqa: E402
from torch_ranks import init, run_ranks  # noqa: E402

import holmes  # noqa: E402


def make(dtype=torch.float32):
    return Odd(uses_late=True).to(dtype)


def make_optimizer(model, **options):
    options = {"bucket_bytes": 700, "lr": 0.01, "eps": 1e-4, **options}
    return holmes.DistributedOptimizer(model, torch.optim.AdamW, params=decayed(model), **options)


def train(model, optimizer, rank, size, steps):
    losses = []
    for step in steps:
        x, y = (t.chunk(size)[rank] for t in batch(step))
        loss = nn.functional.mse_loss(model(x.to(model.scale.dtype)).float(), y)
        optimizer.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if size > 1:
            dist.all_reduce(total)
        losses.append(total.item() / size)
    return losses


def save_after_three(rank, size, store, folder, dtype):
    """Trains 3 steps, saves, trains 3 more: what loading must continue."""
    import torch.distributed.checkpoint as dcp

    init(store, rank, size)
    model = make(dtype)
    optimizer = make_optimizer(model)
    train(model, optimizer, rank, size, range(3))
    optimizer.synchronize()
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    torch.save(optimizer.state_dict(), f"{folder}-local-{rank}")
    return train(model, optimizer, rank, size, range(3, 6))


def load_and_go_on(rank, size, store, folder, dtype, same):
    import torch.distributed.checkpoint as dcp

    init(store, rank, size)
    model = make(dtype)
    optimizer = make_optimizer(model, lr=0.5, bucket_bytes=1500)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.01
    losses = train(model, optimizer, rank, size, range(3, 6))
    if same:  # torch.save of a rank's own part
        optimizer.close()
        again = make_optimizer(model, lr=0.5)
        train(model, again, rank, size, range(2))
        again.load_state_dict(torch.load(f"{folder}-local-{rank}", weights_only=False))
        assert again.param_groups[1]["lr"] == 0.02
    return losses


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((2, 1), torch.float32), ((4, 2), torch.float32), ((2, 2), torch.float32), ((1, 2), torch.bfloat16)],
)
def test_a_checkpoint_continues_on_another_number_of_ranks(tmp_path, sizes, dtype):
    saved, loaded = sizes
    folder = str(tmp_path / "checkpoint")
    expected = run_ranks(save_after_three, saved, folder, dtype)[0]
    losses = run_ranks(load_and_go_on, loaded, folder, dtype, saved == loaded and dtype == torch.float32)[0]
    # bf16 models round each rank's share of the batch on its own: another number of ranks is another rounding.
    torch.testing.assert_close(losses, expected, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=0)
    assert expected[-1] < expected[0]


def save_after_two_and_four(rank, size, store, folder):
    init(store, rank, size)
    model = make()
    optimizer = make_optimizer(model)
    for steps in (range(2), range(2, 4)):
        train(model, optimizer, rank, size, steps)
        torch.save(optimizer.state_dict(), f"{folder}/{rank}-{steps.stop}")


def load_other_steps(rank, size, store, folder, begun):
    """What a job leaves that dies while its ranks save, one of them quicker than the other."""
    init(store, rank, size)
    model = make()
    optimizer = make_optimizer(model)
    train(model, optimizer, rank, size, range(begun))
    optimizer.synchronize()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.load_state_dict(torch.load(f"{folder}/{rank}-{[2, 4][rank]}"))
    for _ in range(2):  # whoever goes on after the first one does not go on without the state
        with pytest.raises((ValueError, RuntimeError)) as caught:
            train(model, optimizer, rank, size, range(1))
        optimizer.zero_grad()
        optimizer.synchronize()
        assert all(map(torch.equal, before, model.parameters()))
    return str(caught.value)


def load_the_same_part_twice(rank, size, store, folder):
    init(store, rank, size)
    model = make()
    optimizer = make_optimizer(model)
    optimizer.load_state_dict(torch.load(f"{folder}/0-2"))
    for _ in range(2):
        with pytest.raises(ValueError, match="lacks element"):
            train(model, optimizer, rank, size, range(1))
        optimizer.zero_grad()
    optimizer.load_state_dict(torch.load(f"{folder}/{rank}-2"))
    return train(model, optimizer, rank, size, range(2, 4))


@pytest.mark.parametrize("begun", [0, 1])
def test_parts_that_ranks_saved_after_other_steps_are_refused(tmp_path, begun):
    run_ranks(save_after_two_and_four, 2, str(tmp_path))
    for said in run_ranks(load_other_steps, 2, str(tmp_path), begun):
        assert "the state of rank 0 of this group is after 2 steps, that of rank 1 after 4" in said


def test_a_state_that_cannot_be_taken_is_refused_until_another_is_loaded(tmp_path):
    run_ranks(save_after_two_and_four, 2, str(tmp_path))
    run_ranks(load_the_same_part_twice, 2, str(tmp_path))


def go_on_from_plain(rank, size, store, after_a_step):
    """Three steps of a plain optimizer on the whole batch; then three more, beside a sharded one that took over."""
    init(store, rank, size)
    reference = make()
    plain = torch.optim.AdamW(decayed(reference), lr=0.01, eps=1e-4)

    def train_plain(steps):
        losses = []
        for step in steps:
            x, y = batch(step)
            loss = nn.functional.mse_loss(reference(x), y)
            loss.backward()
            plain.step()
            plain.zero_grad()
            losses.append(loss.item())
        return losses

    train_plain(range(3))
    model = make()
    optimizer = make_optimizer(model, lr=0.5)
    if after_a_step:
        train(model, optimizer, rank, size, range(1))
    model.load_state_dict(reference.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    return train_plain(range(3, 6)), train(model, optimizer, rank, size, range(3, 6))


@pytest.mark.parametrize("after_a_step", [False, True])
def test_a_plain_optimizers_state_is_taken_over(after_a_step):
    for expected, losses in run_ranks(go_on_from_plain, 2, after_a_step):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


def without(state, *path):
    """A copy of nested dicts without what is there."""
    first, *rest = path
    return {k: without(v, *rest) if k == first else v for k, v in state.items() if k != first or rest}


@pytest.mark.parametrize("after_a_step", [False, True])
def test_a_state_that_does_not_fit_changes_nothing(after_a_step):
    def stepped(optimizer_class, **options):
        model = nn.Linear(8, 8)
        optimizer = holmes.DistributedOptimizer(model, optimizer_class, **options)
        if after_a_step:
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    _, adam = stepped(torch.optim.Adam, lr=0.1)
    good = adam.state_dict()
    good["settings"] = good["settings"].replace('"steps": 0', '"steps": 1')
    weight = good["state"]["weight"]
    model = nn.Linear(8, 8)
    plain = torch.optim.Adam([model.weight], lr=0.1)

    def with_weight(entries):
        return {**good, "state": {**good["state"], "weight": entries}}

    damaged = {
        "is None": None,
        "this has []": {},
        "this has ['settings']": without(good, "state"),
        "is damaged: 'no'": {**good, "settings": "no"},
        "is damaged: '[1]'": {**good, "settings": "[1]"},
        "is damaged: None": {**good, "settings": None},
        "2 parameter groups": {**good, "settings": good["settings"].replace('"groups": [', '"groups": [{}, ')},
        "has ['exp_avg', 'exp_avg_sq', 'is_stepped']": without(good, "state", "weight", "step"),
        "cannot be Tensor of shape (3,)": with_weight({**weight, "step": torch.ones(3)}),
        "cannot be elements from 0 of 8": with_weight(good["state"]["bias"]),
        "groups of [1] parameters, this optimizer of [2]": plain.state_dict(),
    }
    _, optimizer = stepped(torch.optim.Adam, lr=0.5)
    for text, state in damaged.items():
        with pytest.raises(ValueError, match=re.escape(text)):
            optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.5
    _, sgd = stepped(torch.optim.SGD, lr=0.5, momentum=0.9)
    before = sgd.state_dict()["settings"]
    with pytest.raises(ValueError, match="an optimizer of the same class"):
        sgd.load_state_dict(good)
    assert sgd.state_dict()["settings"] == before
    assert "betas" not in sgd.param_groups[0]
