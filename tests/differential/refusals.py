"""What cannot work between backward and step, or after it: refused by an error that names the parameter and the fix."""

import torch
from harness import DEFERRED, OURS
from table import fit, mlp, mse, program
from torch import nn

NAMED = r"'(0|2|4)\.(weight|bias)'"


def refused(error, **options):
    return program(**{"variants": (OURS, DEFERRED), "ranks": (1, 2), "error": error, **options})


def fit_with(env, **callbacks):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    fit(env, model, optimizer, **{name: (lambda s, f=f: f(model, optimizer)) for name, f in callbacks.items()})


@refused(NAMED + r"(?s:.*)max_grad_norm")
def clip_grad_norm_between(env):
    fit_with(env, after_backward=lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@refused(NAMED)
def clip_grad_value_between(env):
    fit_with(env, after_backward=lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.1))


@refused(NAMED)
def gradients_read_between(env):
    fit_with(env, after_backward=lambda model, _: [p.grad.norm() for p in model.parameters()])


@refused(NAMED)
def gradients_printed_between(env):
    fit_with(env, after_backward=lambda model, _: [p.grad.sum().item() for p in model.parameters()])


@refused(NAMED)
def noise_added_to_gradients(env):
    fit_with(env, after_backward=lambda model, _: [p.grad.add_(0.01) for p in model.parameters()])


@refused(NAMED)
def one_gradient_cleared_before_step(env):
    def clear(model, _):
        model[2].weight.grad = None

    fit_with(env, after_backward=clear)


@refused(NAMED)
def gradients_replaced_before_step(env):
    def replace(model, _):
        for p in model.parameters():
            p.grad = torch.ones_like(p)

    fit_with(env, after_backward=replace)


@refused(r"loss_scale")
def grad_scaler(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        x, y = env.batch(step)
        optimizer.zero_grad()
        scaler.scale(mse(model(x), y)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@refused(r"loss_scale")
def grad_scaler_step_without_unscale(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        x, y = env.batch(step)
        optimizer.zero_grad()
        scaler.scale(mse(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()


@refused(r"loss_scale", ranks=(2,))
def grad_scaler_of_gradients_that_are_not_sent(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        x, y = env.batch(step)
        optimizer.zero_grad()
        with env.no_sync(model, optimizer):
            scaler.scale(mse(model(x), y)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@refused(NAMED)
def a_surplus_backward(env):
    def again(model, _):
        mse(model(env.batch(9)[0]), env.batch(9)[1]).backward()

    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    fit(env, model, optimizer, after_backward=lambda step: again(model, optimizer) if step else None)


@refused(NAMED)
def loaded_by_assignment(env):
    state = {name: tensor.clone() for name, tensor in env.seeded(mlp).state_dict().items()}
    fit_with(env, after_step=lambda model, _: model.load_state_dict(state, assign=True))


@refused(NAMED)
def parameter_object_replaced(env):
    def replace(model, _):
        model[2].weight = nn.Parameter(torch.ones_like(model[2].weight))

    fit_with(env, after_step=replace)


@refused(NAMED)
def converted_after_the_first_step(env):
    def convert(model, _):
        model.to(torch.float32)
        env.dtype = torch.float32

    fit_with(env, after_step=convert)


@refused("deepcopy|copied|copy")
def deepcopy_of_the_optimizer(env):
    import copy

    fit_with(env, after_step=lambda _, optimizer: copy.deepcopy(optimizer))


@refused("frozen")
def unfrozen_later(env):
    def build():
        model = mlp()
        model[0].requires_grad_(False)
        return model

    model = env.model(build)
    optimizer = env.optimizer(model, lr=0.1)
    fit(env, model, optimizer, after_step=lambda step: model[0].requires_grad_(True))


class FlattenedLBFGS(torch.optim.LBFGS):
    pass


class Centralized(torch.optim.SGD):
    """Gradient centralization: an element's update depends on its row's."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.sub_(p.grad.mean())
        super().step(closure)


class LayerAdapted(torch.optim.Optimizer):
    """LARS in its simplest form: the rate is proportional to the parameter's norm."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"] * p.norm() / (1 + p.grad.norm()))


@refused("whole parameters|element")
def lbfgs_by_another_name(env):
    model = env.model(mlp)
    env.optimizer(model, FlattenedLBFGS, lr=0.1)


@refused("whole parameters|element")
def adafactor(env):
    model = env.model(mlp)
    env.optimizer(model, type("Renamed", (torch.optim.Adafactor,), {}), lr=0.1)


@refused("whole parameters|element")
def centralized_gradients(env):
    model = env.model(mlp)
    env.optimizer(model, Centralized, lr=0.1)


@refused("whole parameters|element")
def layer_adapted_rates(env):
    model = env.model(mlp)
    env.optimizer(model, LayerAdapted, lr=0.1)


@refused(NAMED + r"(?s:.*)zero_grad")
def a_loop_without_zero_grad(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    for step in range(4):
        x, y = env.batch(step)
        mse(model(x), y).backward()
        optimizer.step()


@refused(NAMED + r"(?s:.*)zero_grad")
def step_twice_after_one_backward(env):
    fit_with(env, after_step=lambda _, optimizer: optimizer.step())


@refused(NAMED + r"(?s:.*)zero_grad")
def a_parameter_without_zero_grad_that_is_unused_then(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    for step in range(4):
        x, y = env.batch(step)
        for p in model[2:].parameters():
            p.grad = None
        (mse(model(x), y) if step % 2 == 0 else mse(model[2:](x.new_ones(8, 17)), y.new_ones(8, 6))).backward()
        optimizer.step()


@refused(NAMED + r"(?s:.*)grad_norm")
def gradients_read_after_step(env):
    fit_with(env, after_step=lambda model, _: [p.grad.norm() for p in model.parameters()])
