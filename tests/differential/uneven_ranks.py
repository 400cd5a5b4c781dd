"""Ranks that do not all do the same: validation and checkpoints on the first one, batches that only some can use."""

import io
import tempfile

import pytest
import torch
import torch.distributed as dist
from harness import OURS, UNWATCHED
from table import NO_FSDP2, OURS_ONLY, fit, mlp, mse, program
from torch import nn


def on_first_rank(env, model, act, between):
    """Trains while the first rank alone does `act(step)` and the others wait for it at a barrier."""
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02)

    def callback(step):
        if env.rank == 0:
            act(step)
        if not env.is_plain:
            dist.barrier(group=env.group)

    fit(env, model, optimizer, 8, **{"after_backward" if between else "after_step": callback})


def validate(env, model):
    def act(step):
        with torch.no_grad():
            assert mse(getattr(model, "module", model)(env.batch(step)[0]), env.batch(step)[1]).isfinite()

    return act


@program(variants=NO_FSDP2)
def first_rank_validates(env):
    model = env.model(mlp)
    on_first_rank(env, model, validate(env, model), False)


@program(variants=NO_FSDP2)
def first_rank_validates_between_backward_and_step(env):
    model = env.model(mlp)
    on_first_rank(env, model, validate(env, model), True)


@program(variants=NO_FSDP2)
def first_rank_saves(env):
    model = env.model(mlp)
    on_first_rank(env, model, lambda step: torch.save(model.state_dict(), io.BytesIO()), False)


@program(variants=NO_FSDP2)
def first_rank_saves_between_backward_and_step(env):
    model = env.model(mlp)
    on_first_rank(env, model, lambda step: torch.save(model.state_dict(), io.BytesIO()), True)


@program(variants=NO_FSDP2)
def first_rank_logs_weights(env):
    model = env.model(mlp)
    on_first_rank(env, model, lambda step: [p.norm().item() for p in model.parameters()], False)


@program(variants=(OURS, UNWATCHED), ranks=(2, 4))
def zero_grad_on_the_last_rank_only(env):
    """The others, which step, hear of it at once; nothing has changed, and training goes on."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02)
    for step in range(6):
        x, y = env.batch(step)
        loss = mse(model(x), y)
        loss.backward()
        if step not in (2, 4):
            optimizer.step()
        elif env.is_plain or env.rank == env.size - 1:
            optimizer.zero_grad()
        else:
            must_fail(optimizer.step, rf"rank {env.size - 1}\b")
        optimizer.zero_grad()
        env.record(loss, model)


def must_fail(call, pattern):
    with pytest.raises(RuntimeError, match=pattern):
        call()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("a batch that cannot be used")


class Breakable(nn.Module):
    def __init__(self):
        super().__init__()
        self.below, self.above, self.breaks = mlp(), mlp(), False

    def forward(self, x):
        x = self.below(x)
        return self.above(Fails.apply(x) if self.breaks else x)


@program(variants=OURS_ONLY)
def backward_fails_on_all_ranks(env):
    """Half of the gradients are there when it does; zero_grad drops them."""
    model = env.model(Breakable)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02)
    for step in range(7):
        x, y = env.batch(step)
        model.breaks = step in (0, 3, 4)
        loss = mse(model(x), y)
        try:
            loss.backward()
            optimizer.step()
        except ValueError:
            pass
        optimizer.zero_grad()
        env.record(loss, model)


@program(variants=(OURS, UNWATCHED), ranks=(2, 4))
def backward_fails_on_the_first_rank_only(env):
    model = env.model(Breakable)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02)
    for step in range(5):
        x, y = env.batch(step)
        fails = step == 2
        model.breaks = fails and env.rank == 0 and not env.is_plain
        loss = mse(model(x), y)
        try:
            loss.backward()
            if fails and not env.is_plain:
                must_fail(optimizer.step, r"rank 0\b")
            elif not fails:
                optimizer.step()
        except ValueError:
            pass
        optimizer.zero_grad()
        env.record(loss, model)


class Switched(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.late, self.uses_late = mlp(), mlp(), False

    def forward(self, x):
        return self.body(x) + (self.late(x) if self.uses_late else 0)


def resume_with_unused(env, optimizer_class, **settings):
    """Saved when some parameters have had no gradient yet; goes on with them."""
    import torch.distributed.checkpoint as dcp

    def train(model, optimizer, start, uses_late):
        model.uses_late = uses_late
        fit(env, model, optimizer, 3, start=start)

    model = env.model(Switched)
    optimizer = env.optimizer(model, optimizer_class, **settings)
    train(model, optimizer, 0, False)
    if env.is_ours:
        folder = shared_folder(env)
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
        optimizer.close()
        model = env.model(Switched)
        optimizer = env.optimizer(model, optimizer_class, **settings)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, 3, True)
    train(model, optimizer, 6, False)


def shared_folder(env):
    names = [tempfile.mkdtemp()] if env.rank == 0 else [None]
    dist.broadcast_object_list(names, src=0, group=env.group)
    return names[0]


@program(variants=OURS_ONLY)
def resumed_sgd_with_dampening(env):
    resume_with_unused(env, torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)


@program(variants=OURS_ONLY)
def resumed_nadam(env):
    resume_with_unused(env, torch.optim.NAdam, lr=0.02)


@program(variants=OURS_ONLY)
def resumed_asgd(env):
    resume_with_unused(env, torch.optim.ASGD, lr=0.1, t0=1, lambd=0.05)


@program(variants=OURS_ONLY)
def resumed_adadelta(env):
    resume_with_unused(env, torch.optim.Adadelta, lr=1.0)


@program(variants=OURS_ONLY)
def resumed_rprop(env):
    resume_with_unused(env, torch.optim.Rprop, lr=0.01)


@program(variants=OURS_ONLY)
def resumed_radam(env):
    resume_with_unused(env, torch.optim.RAdam, lr=0.02)


@program(variants=OURS_ONLY)
def group_destroyed_between_two_optimizers(env):
    """torch names some groups after how many there are, so a name may come again."""
    users = None if env.is_plain else dist.new_group()
    one, two = env.model(mlp), env.model(mlp)
    # The second optimizer makes its own group for all-gathers, and so does the third.
    optimizers = [env.optimizer(one, lr=0.1), env.optimizer(two, lr=0.1)]
    if users is not None:
        dist.destroy_process_group(users)
    three = env.model(mlp)
    optimizers.append(env.optimizer(three, lr=0.1))
    for step in range(3):
        x, y = env.batch(step)
        loss = sum(mse(model(x), y) for model in (one, two, three))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        env.record(loss, one, two, three)
