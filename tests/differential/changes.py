"""Parameters that are changed from outside of the optimizer, or used while it works on them."""

import copy
import io

import torch
from harness import WIDTH
from table import NO_FSDP2, OURS_ONLY, fit, mlp, mse, program
from torch import nn

MASTERS = {"reduce_dtype": torch.float32}  # equal gradients of all ranks stay exact


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def rolled_back(env, *, load=lambda model, state: model.load_state_dict(state), between=False, **ours):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02, eps=1e-3, ours=ours)
    saved = {}

    def change(step):
        if step == 1:
            saved.update(snapshot(model))
        elif step in (2, 4):
            load(model, saved)

    fit(env, model, optimizer, 7, **{"after_backward" if between else "after_step": change})


@program(variants=NO_FSDP2)
def load_state_dict_between_steps(env):
    rolled_back(env)


@program(variants=OURS_ONLY)
def load_state_dict_between_backward_and_step(env):
    rolled_back(env, between=True)


@program(variants=OURS_ONLY)
def zeroed_between_where_gradients_change_in_the_step(env):
    """torch's foreach SGD with nesterov adds the momentum to the gradients in place."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.05, momentum=0.9, nesterov=True, foreach=True)
    fit(env, model, optimizer, after_backward=lambda s: zero_some(model, s) if s % 2 else None)


@program(variants=OURS_ONLY, same_data=True, dtype=torch.bfloat16)
def load_state_dict_bfloat16(env):
    rolled_back(env, **MASTERS)


@program(variants=OURS_ONLY, same_data=True, dtype=torch.bfloat16)
def load_state_dict_bfloat16_between_backward_and_step(env):
    rolled_back(env, between=True, **MASTERS)


@program(variants=OURS_ONLY, same_data=True, dtype=torch.float16)
def load_state_dict_float16(env):
    rolled_back(env, **MASTERS)


@torch.no_grad()
def zero_some(model, _):
    model[0].weight[:3].zero_()
    model[2].bias.zero_()
    model[4].weight.data.mul_(0.5)


@program(variants=NO_FSDP2)
def zeroed_in_place(env):
    model = env.model(mlp)
    fit(env, model, env.optimizer(model, lr=0.1, momentum=0.9), after_step=lambda s: zero_some(_bare(model), s))


@program(variants=OURS_ONLY, same_data=True, dtype=torch.bfloat16)
def zeroed_in_place_bfloat16(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02, eps=1e-3, ours=MASTERS)
    fit(env, model, optimizer, after_step=lambda s: zero_some(model, s))


@program(variants=OURS_ONLY)
def zeroed_in_place_between_backward_and_step(env):
    model = env.model(mlp)
    fit(env, model, env.optimizer(model, lr=0.1, momentum=0.9), after_backward=lambda s: zero_some(model, s))


@program(variants=OURS_ONLY, same_data=True, dtype=torch.bfloat16)
def zeroed_in_place_bfloat16_between_backward_and_step(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.SGD, lr=0.1, ours=MASTERS)
    fit(env, model, optimizer, after_backward=lambda s: zero_some(model, s))


def _bare(model):
    return getattr(model, "module", model)


@program(variants=NO_FSDP2)
def pruned_by_a_mask(env):
    model = env.model(mlp)
    bare = _bare(model)
    masks = [torch.arange(p.numel()).view_as(p) % 3 != 0 for p in bare.parameters()]

    def prune(step):
        for p, mask in zip(bare.parameters(), masks, strict=True):
            p.data.mul_(mask)

    fit(env, model, env.optimizer(model, torch.optim.Adam, lr=0.02), after_step=prune)


@program(variants=OURS_ONLY)
def pruned_by_torch(env):
    from torch.nn.utils import prune

    def build():
        model = mlp()
        prune.l1_unstructured(model[0], "weight", 0.4)
        prune.random_structured(model[2], "weight", 0.3, dim=0)
        return model

    model = env.model(build)
    fit(env, model, env.optimizer(model, lr=0.1, momentum=0.9))


@program(variants=OURS_ONLY)
def data_replaced(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02)

    def replace(step):
        if step in (0, 2, 3):
            model[0].weight.data = model[0].weight.data * 0.5
            model[4].bias.data = torch.ones_like(model[4].bias.data)

    fit(env, model, optimizer, 6, after_step=replace)


@program(variants=OURS_ONLY)
def data_replaced_between_backward_and_step(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02)

    def replace(step):
        if step in (1, 3):
            model[0].weight.data = model[0].weight.data * 0.5

    fit(env, model, optimizer, 6, after_backward=replace)


@program(variants=OURS_ONLY, same_data=True, dtype=torch.bfloat16)
def data_replaced_bfloat16(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1, ours=MASTERS)

    def replace(step):
        if step in (1, 3):
            model[0].weight.data = model[0].weight.data * 0.5

    fit(env, model, optimizer, 6, after_step=replace)


@program(variants=OURS_ONLY)
def data_swapped_for_averages_and_back(env):
    """As Lightning's and timm's EMA callbacks do around validation."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02)
    averages = [p.detach().clone() for p in model.parameters()]

    def validate(step):
        for average, p in zip(averages, model.parameters(), strict=True):
            average.mul_(0.5).add_(p.data, alpha=0.5)
        own = [p.data for p in model.parameters()]
        for average, p in zip(averages, model.parameters(), strict=True):
            p.data = average.clone()
        with torch.no_grad():
            env.record(mse(model(env.batch(step)[0]), env.batch(step)[1]), model)
        for mine, p in zip(own, model.parameters(), strict=True):
            p.data = mine

    fit(env, model, optimizer, after_step=validate)


@program(variants=OURS_ONLY)
def stored_and_restored_by_copy(env):
    """As EMA classes with store(), copy_to() and restore() do."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1, momentum=0.9)
    averages = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def validate(step):
        own = [p.clone() for p in model.parameters()]
        for average, p in zip(averages, model.parameters(), strict=True):
            average.sub_(0.3 * (average - p))
            p.copy_(average)
        env.record(mse(model(env.batch(step)[0]), env.batch(step)[1]), model)
        for mine, p in zip(own, model.parameters(), strict=True):
            p.copy_(mine)

    fit(env, model, optimizer, after_step=validate)


class UsesDetached(nn.Module):
    """The last operation's weight is used by the first one too, detached: its gradient is complete long before."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.first, self.body = nn.Linear(WIDTH, WIDTH), mlp()

    def forward(self, x):
        x = nn.functional.linear(self.first(x), self.embed.detach())
        return nn.functional.linear(self.body(x), self.embed)


@program()
def weight_used_detached_earlier(env):
    model = env.model(UsesDetached)
    fit(env, model, env.optimizer(model, lr=0.3))


@program(variants=OURS_ONLY)
def weight_used_by_data_earlier(env):
    class ByData(UsesDetached):
        def forward(self, x):
            x = self.first(x) @ self.embed.data.t()
            return self.body(x) @ self.embed.t()

    model = env.model(ByData)
    fit(env, model, env.optimizer(model, lr=0.3))


@program(variants=OURS_ONLY)
def state_dict_is_read_each_step(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02)
    for step in range(5):
        x, y = env.batch(step)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        before = sum(t.double().sum() for t in model.state_dict().values())
        optimizer.step()
        after = sum(t.double().abs().sum() for t in model.state_dict().values())
        env.record(before + after, model)


@program(variants=OURS_ONLY)
def parameters_are_read_in_many_ways(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.5)
    ways = [
        lambda p: torch.tensor(p.sum().item()),
        lambda p: torch.tensor(p.detach().numpy().sum()),
        lambda p: nn.utils.parameters_to_vector([p]).sum(),
        lambda p: p.data.view(-1)[0],
        lambda p: torch.tensor(p.tolist()).sum(),
        lambda p: p.to(torch.float32).sum(),
        lambda p: copy.deepcopy(p).sum(),
        lambda p: torch.stack([p.detach()]).sum(),
        lambda p: torch._foreach_norm([p.detach()])[0],
        lambda p: torch.tensor([float(v) for v in p.flatten()]).sum(),
        lambda p: torch.utils.dlpack.from_dlpack(p.detach()).sum(),
    ]
    for step, way in enumerate(ways):
        x, y = env.batch(step)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        env.record(sum(way(p).double() for p in model.parameters()), model)


@program(variants=OURS_ONLY)
def saved_and_loaded_by_torch(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1, momentum=0.9)

    def save(step):
        buffer = io.BytesIO()
        torch.save([model, model.state_dict(), model[0].weight], buffer)
        buffer.seek(0)
        whole, state, weight = torch.load(buffer, weights_only=False)
        assert torch.equal(state["0.weight"], weight)
        other = copy.deepcopy(model)
        env.record(sum(p.sum() for m in (whole, other) for p in m.parameters()), model)

    fit(env, model, optimizer, 4, after_step=save)


@program(variants=OURS_ONLY)
def vector_to_parameters(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)

    def shrink(step):
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 0.9, model.parameters())

    fit(env, model, optimizer, after_step=shrink)


@program(variants=NO_FSDP2)
def initialized_again(env):
    """Warm restarts of some layers: their init functions write in place."""
    model = env.model(mlp)
    bare = _bare(model)
    optimizer = env.optimizer(model, torch.optim.Adam, lr=0.02)

    def restart(step):
        if step == 2:
            nn.init.constant_(bare[0].weight, 0.1)
            nn.init.zeros_(bare[4].bias)

    fit(env, model, optimizer, after_step=restart)


@program(variants=OURS_ONLY)
def optimizer_state_round_trip(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02, amsgrad=True)

    def round_trip(step):
        if step in (1, 3):
            buffer = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], buffer)
            buffer.seek(0)
            state, own = torch.load(buffer, weights_only=False)
            model.load_state_dict(state)
            optimizer.load_state_dict(own)

    fit(env, model, optimizer, after_step=round_trip)


@program(variants=OURS_ONLY)
def rolled_back_with_the_optimizer(env):
    """Megatron's and Lightning's answer to a loss spike: both states of some steps ago are loaded again."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02)
    saved = []

    def go_back(step):
        if step == 2:
            saved.extend(copy.deepcopy([model.state_dict(), optimizer.state_dict()]))
        if step == 4:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])

    fit(env, model, optimizer, 8, after_step=go_back)


@program(variants=OURS_ONLY)
def closed_and_made_anew(env):
    model = env.model(mlp)
    for phase in range(3):
        optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02)
        fit(env, model, optimizer, 3, start=3 * phase)
        if env.is_ours:
            optimizer.close()


def exchange(model, _step):
    """The same values at other places, which no version counts."""
    for p in model.parameters():
        p.data = p.data.flip(0).clone() if p.dim() == 1 else p.data
        p.data.copy_(p.data.flip(0).flip(-1))


@program(variants=OURS_ONLY)
def values_exchanged_between_backward_and_step(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.Adam, lr=0.02)
    fit(env, model, optimizer, after_backward=lambda step: exchange(model, step) if step % 2 else None)


@program(variants=OURS_ONLY)
def signs_changed_between_backward_and_step(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.Adam, lr=0.02)
    fit(env, model, optimizer, after_backward=lambda s: [p.data.neg_() for p in model.parameters()] if s % 2 else None)


@program(variants=OURS_ONLY)
def converted_to_its_own_dtype_and_shared(env):
    """Conversions that change nothing, with the gradients of the step still there."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.Adam, lr=0.02)
    fit(env, model, optimizer, after_step=lambda _: model.to(env.dtype).cpu().double())
