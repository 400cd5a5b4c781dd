"""What people who had not read the code tried: optimizers of their own, transforms, unusual places for settings."""

import copy
import io
from contextlib import nullcontext

import torch
from harness import WIDTH
from refusals import NAMED, refused
from table import OURS_ONLY, fit, mlp, mse, program
from torch import nn
from torch.nn.utils import parameters_to_vector


class Counting(torch.optim.Optimizer):
    """Decays its rate by a counter of its own, as many hand-written optimizers do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.t = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"] / self.t)


class AggregatedMomentum(torch.optim.Optimizer):
    """AggMo: a parameter's state is a dict of dicts."""

    def __init__(self, params, lr=0.1, betas=(0.0, 0.9)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffers = self.state[p].setdefault("buffers", {b: torch.zeros_like(p) for b in group["betas"]})
                for beta, buffer in buffers.items():
                    buffer.mul_(beta).add_(p.grad)
                    p.sub_(buffer * group["lr"] / len(buffers))


class NormClipping(Counting):
    """By the norm over all parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = parameters_to_vector([g.contiguous() for g in gradients]).norm()
        for g in gradients:
            g.div_(norm + 1)
        super().step(closure)


class GlobalState(Counting):
    """A state of no parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        self.t = self.state["steps"]["n"] = self.state["steps"].get("n", 0)
        super().step(closure)


class Numbered(torch.optim.Optimizer):
    """Counts in Python's integers, as torch's own did before 1.12."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                p.sub_(p.grad * group["lr"] / state["step"])


def lr_changes_and_drops(env, optimizer_class):
    model = env.model(mlp)
    optimizer = env.optimizer(model, optimizer_class, lr=0.1)
    for step in range(7):
        x, y = env.batch(step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        if step % 3 == 1:
            optimizer.param_groups[0]["lr"] *= 0.5
        if step % 3 == 2:
            optimizer.zero_grad()
        else:
            optimizer.step()
        env.record(loss, model)


@program(variants=OURS_ONLY)
def an_optimizer_with_a_counter(env):
    lr_changes_and_drops(env, Counting)


@program(variants=OURS_ONLY)
def an_optimizer_with_nested_state(env):
    lr_changes_and_drops(env, AggregatedMomentum)


@program(variants=OURS_ONLY)
def integers_in_a_loaded_state(env):
    """The first bias has fewer elements than there are ranks: some have no part of it."""
    model = env.model(lambda: nn.Sequential(nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH)))
    optimizer = env.optimizer(model, Numbered, lr=0.1)
    fit(env, model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    if env.is_ours:
        optimizer.close()
    optimizer = env.optimizer(model, Numbered, lr=0.1)
    optimizer.load_state_dict(state)
    fit(env, model, optimizer)


@program(variants=OURS_ONLY)
def each_rank_saves_a_file_and_resumes(env):
    """torch.save of what state_dict() says, without torch.distributed.checkpoint."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02)
    fit(env, model, optimizer)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    if env.is_ours:
        optimizer.close()
    file.seek(0)
    weights, state = torch.load(file, weights_only=False)
    model = env.model(mlp)
    model.load_state_dict(weights)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02)
    optimizer.load_state_dict(state)
    fit(env, model, optimizer)


@refused("whole parameters(?s:.*)max_grad_norm")
def an_optimizer_that_clips_by_the_norm(env):
    env.optimizer(env.model(mlp), NormClipping, lr=0.1)


@refused("no parameter(?s:.*)'steps'")
def an_optimizer_with_state_of_no_parameter(env):
    env.optimizer(env.model(mlp), GlobalState, lr=0.1)


@program(variants=OURS_ONLY)
def settings_that_are_lists_change_in_place(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.NAdam, lr=0.02, betas=[0.9, 0.99])

    def change(step):
        optimizer.param_groups[0]["betas"][0] = 0.9 - 0.2 * (step % 2)

    fit(env, model, optimizer, after_backward=change)


@program(variants=OURS_ONLY)
def data_transposed_in_place(env):
    model = env.model(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    optimizer = env.optimizer(model, torch.optim.Adam, lr=0.02)

    def transpose(step):
        if step % 2:
            model[0].weight.data = model[0].weight.data.t()

    fit(env, model, optimizer, after_backward=transpose, after_step=transpose)


def penalized(env, hold):
    """The norm of the first loss's gradients is a part of the second loss."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.Adam, lr=0.02)
    for step in range(5):
        x, y = env.batch(step, rows=16)
        optimizer.zero_grad()
        first, second = ((a, b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True))
        loss = mse(model(first[0]), first[1])
        if hold:
            with env.no_sync(model, optimizer):
                loss.backward(create_graph=True)
        else:
            loss.backward(create_graph=True)
        penalty = sum(p.grad.pow(2).sum() for p in model.parameters())
        (mse(model(second[0]), second[1]) + 0.1 * penalty).backward()
        optimizer.step()
        env.record(loss, model)


@program(variants=OURS_ONLY, same_data=True)
def gradients_of_gradients(env):
    penalized(env, hold=False)


@program(variants=OURS_ONLY, same_data=True)
def gradients_of_gradients_in_no_sync(env):
    penalized(env, hold=True)


@program(variants=OURS_ONLY)
def one_forward_two_losses_of_disjoint_parameters(env):
    heads = env.model(lambda: nn.ModuleList([mlp(), mlp()]))
    optimizer = env.optimizer(heads, lr=0.05)
    for step in range(5):
        x, y = env.batch(step)
        losses = [mse(head(x), y) for head in heads]
        for loss in losses:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        env.record(losses[0] + losses[1], heads)


@program(variants=OURS_ONLY)
def transforms_right_after_step(env):
    """torch.func takes tensors in C++."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.Adam, lr=0.02)
    for step in range(6):
        x, y = env.batch(step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        parameters = dict(model.named_parameters())
        if step % 3 == 0:
            read = torch.vmap(lambda row: row.sum() * row.abs().max())(parameters["0.weight"]).sum()
        elif step % 3 == 1:
            slopes = torch.func.grad(lambda p: sum((v**3).sum() for v in p.values()))(parameters)
            read = sum(slope.sum() for slope in slopes.values())
        else:
            slopes = torch.func.grad(lambda p, x=x: torch.func.functional_call(model, p, (x,)).pow(2).mean())(
                parameters
            )
            read = sum(slope.sum() for slope in slopes.values())
        env.record(loss + read.detach(), model)


@program(variants=OURS_ONLY)
def a_first_window_that_is_shorter_than_declared(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1, ours={"accumulation_steps": 4})
    for step, count in enumerate((2, 4, 4)):
        x, y = env.batch(step, rows=16)
        optimizer.zero_grad()
        total = 0.0
        for x_part, y_part in zip(x.chunk(count), y.chunk(count), strict=True):
            loss = mse(model(x_part), y_part) / count
            loss.backward()
            total += loss.detach()
        optimizer.step()
        env.record(total, model)


def changed_groups(change):
    def train(env):
        model = env.model(mlp)
        optimizer = env.optimizer(model, lr=0.1)
        fit(env, model, optimizer, after_step=lambda _: change(model, optimizer))

    return train


@refused("param_groups")
def a_parameter_is_taken_out_of_its_group(env):
    changed_groups(lambda model, o: o.param_groups[0]["params"].pop())(env)


@refused("param_groups")
def the_groups_are_replaced(env):
    def replace(_, optimizer):
        optimizer.param_groups = [dict(group, lr=0.0) for group in optimizer.param_groups]

    changed_groups(replace)(env)


@refused(NAMED + r"(?s:.*)zero_grad")
def a_second_step_after_moving_the_state(env):
    """Walking through optimizer.state, to move it to a device, is allowed; the second step has no gradients."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)

    def read(_):
        for state in optimizer.state.values():
            assert state.get("momentum_buffer") is None
        optimizer.step()

    fit(env, model, optimizer, after_step=read)


LOCAL = NAMED + r"(?s:.*)max_grad_norm"


def clipped(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@refused(LOCAL, ranks=(2,))
def clip_of_gradients_with_a_graph(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    for step in range(3):
        x, y = env.batch(step)
        optimizer.zero_grad()
        mse(model(x), y).backward(create_graph=True)
        clipped(model)
        optimizer.step()


@refused(LOCAL, ranks=(2,))
def clip_of_gradients_set_by_hand(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    for step in range(3):
        x, y = env.batch(step)
        for p, g in zip(
            model.parameters(), torch.autograd.grad(mse(model(x), y), list(model.parameters())), strict=True
        ):
            p.grad = g
        clipped(model)
        optimizer.step()
        optimizer.zero_grad()


@refused(LOCAL, ranks=(2,))
def clip_in_the_first_step_only(env):
    model = env.model(mlp)
    fit(env, model, env.optimizer(model, lr=0.1), after_backward=lambda step: step or clipped(model))


@refused(NAMED + r"(?s:.*)changed between backward and step", ranks=(2,))
def signs_of_gradients_that_are_held(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    for step in range(3):
        x, y = env.batch(step)
        optimizer.zero_grad()
        with getattr(optimizer, "no_sync", nullcontext)():
            mse(model(x), y).backward()
        for p in model.parameters():
            p.grad.sign_()
        optimizer.step()


@refused(NAMED + r"(?s:.*)changed between backward and step", ranks=(2,))
def value_clipping_between_micro_batches(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    for step in range(3):
        x, y = env.batch(step)
        for xs, ys in zip(x.chunk(2), y.chunk(2), strict=True):
            mse(model(xs), ys).backward()
            if step == 0:  # later ones have been sent
                nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()


class TrustRatio(torch.optim.Optimizer):
    """LARS as it is usually written: the ratio counts only where there is weight decay."""

    def __init__(self, params, lr=0.1, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update = p.grad + group["weight_decay"] * p
                    p.sub_(update * group["lr"] * (p.norm() / update.norm() if group["weight_decay"] else 1.0))


def decayed_and_not(model, weight_decay):
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1]},
    ]


@refused("TrustRatio needs whole parameters")
def a_rule_that_a_group_turns_on(env):
    model = env.model(mlp)
    env.optimizer(model, TrustRatio, params=lambda m: decayed_and_not(m, 0.1), lr=0.1)


@refused("TrustRatio needs whole parameters")
def a_rule_that_is_turned_on_later(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, TrustRatio, params=lambda m: decayed_and_not(m, 0.0), lr=0.1)
    fit(env, model, optimizer, after_step=lambda step: optimizer.param_groups[0].update(weight_decay=0.1 * step))


class ClippedSGD(torch.optim.SGD):
    """Each parameter's gradient, where it is large."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if (norm := p.grad.norm()) > 20:
                p.grad.mul_(20 / norm)
        return super().step(closure)


@refused("ClippedSGD needs whole parameters")
def an_optimizer_that_clips_what_is_large(env):
    env.optimizer(env.model(mlp), ClippedSGD, lr=0.1)


# --- what a second outsider tried ---


@refused("optimizer.state was read.*state_dict")
def moments_are_looked_up(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    fit(env, model, optimizer, after_step=lambda _: optimizer.state[model[0].weight])


@refused("optimizer.state was written to.*state_dict")
def moments_are_reset(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    fit(env, model, optimizer, after_step=lambda _: optimizer.state.clear())


@program(variants=OURS_ONLY)
def a_hook_drops_a_gradient_in_some_steps(env):
    model, at = env.model(mlp), [0]
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.05, weight_decay=0.3)

    def drop(parameter):
        if at[0] % 2:
            parameter.grad = None

    model[2].weight.register_post_accumulate_grad_hook(drop)
    fit(env, model, optimizer, 6, after_step=lambda step: at.__setitem__(0, step + 1))


@program(variants=OURS_ONLY)
def perturbed_through_data_and_put_back(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.SGD, lr=0.05)
    for step in range(6):
        x, y = env.batch(step)
        optimizer.zero_grad()
        kept = [p.data for p in model.parameters()] if step > 2 else []
        for p, _ in zip(model.parameters(), kept, strict=False):
            p.data = p.data * 1.01
        loss = mse(model(x), y)
        loss.backward()
        for p, data in zip(model.parameters(), kept, strict=False):
            p.data = data
        optimizer.step()
        env.record(loss, model)
