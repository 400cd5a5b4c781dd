"""Models of all kinds: how their parameters are made, shared and used."""

import torch
from harness import DDP, FSDP2, OUR_VARIANTS, WIDTH
from table import NO_FSDP2, OURS_ONLY, fit, mlp, mse, program
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


def fit_model(env, build, optimizer_class=torch.optim.AdamW, options=None, **settings):
    model = env.model(build, **((options or {}) if env.variant == DDP else {}))
    fit(env, model, env.optimizer(model, optimizer_class, **{"lr": 0.02, **settings}), 5)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.out = nn.Linear(WIDTH, 9, bias=False), mlp(9, 9), nn.Linear(WIDTH, 9, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.body(self.out(x) + self.embed(x).tanh()) @ self.embed.weight


@program(variants=NO_FSDP2)
def tied_weights(env):
    fit_model(env, Tied)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.below, self.frozen, self.above = mlp(), mlp().requires_grad_(False), mlp()

    def forward(self, x):
        return self.above(self.frozen(self.below(x)))


@program()
def frozen_in_the_middle(env):
    fit_model(env, Frozen)


class Odd(nn.Module):
    """Scalars, empty and odd shapes, a list, and parameters that nothing uses."""

    def __init__(self):
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))
        self.never, self.cube = nn.Linear(3, 5), nn.Parameter(torch.randn(3, 1, 7))
        self.shifts = nn.ParameterList([nn.Parameter(torch.randn(n)) for n in (1, WIDTH, 1)])
        self.body = mlp()

    def forward(self, x):
        x = self.body(x) * self.scale + self.empty.sum()
        for shift in self.shifts:
            x = x + shift
        return x * self.cube.pow(2).mean()


@program(variants=NO_FSDP2)
def odd_shapes_and_unused(env):
    fit_model(env, Odd, options={"find_unused_parameters": True})


class Transposed(nn.Module):
    """Parameters that are not contiguous."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 5).t())
        self.image = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.body = mlp()

    def forward(self, x):
        return self.body(x @ self.weight.t() @ self.weight) + self.image.sum()


@program(variants=OURS_ONLY)
def parameters_that_are_not_contiguous(env):
    fit_model(env, Transposed)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH), mlp(), nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x):
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=self.reentrant))


@program(variants=NO_FSDP2)
def activation_checkpointing_reentrant(env):
    fit_model(env, lambda: Checkpointed(True))


@program()
def activation_checkpointing(env):
    fit_model(env, lambda: Checkpointed(False))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.place = nn.Parameter(torch.randn(WIDTH, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        x = self.embed(x[..., None]) + self.place
        x = self.encoder(x)
        return self.out(x + self.cross(x, self.place.expand_as(x), x, need_weights=False)[0])[..., 0]


@program(variants=NO_FSDP2)
def transformer_encoder(env):
    fit_model(env, Attention, eps=1e-4)


@program(variants=NO_FSDP2, dtype=torch.float32)
def transformer_encoder_float32(env):
    fit_model(env, Attention, eps=1e-2)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells, self.out = kind(1, 5, num_layers=2, batch_first=True), nn.Linear(5, 1)

    def forward(self, x):
        return self.out(self.cells(x[..., None])[0])[..., 0]


@program(variants=NO_FSDP2)
def lstm(env):
    fit_model(env, lambda: Recurrent(nn.LSTM))


@program(variants=NO_FSDP2)
def gru(env):
    fit_model(env, lambda: Recurrent(nn.GRU))


@program(variants=OURS_ONLY)
def truncated_backpropagation(env):
    """Hidden state that outlives the step, detached, as in PyTorch's word language model."""
    cell, out = nn.GRUCell, nn.Linear
    model = env.model(lambda: nn.ModuleDict({"cell": cell(WIDTH, 7), "out": out(7, WIDTH)}))
    optimizer = env.optimizer(model, lr=0.3, clip=0.5)
    hidden = None
    for step in range(6):
        x, y = env.batch(step)
        optimizer.zero_grad()
        hidden = model["cell"](x, None if hidden is None else hidden.detach())
        loss = mse(model["out"](hidden), y)
        loss.backward()
        optimizer.step()
        env.record(loss, model)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3)
        )
        self.up = nn.Sequential(nn.Conv2d(4, 4, 1), nn.PixelShuffle(2), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.out = nn.Linear(4, WIDTH)

    def forward(self, x):
        return self.out(self.up(self.body(x[:, None, :, None] * x[:, None, None, :])))


@program(same_data=True)
def batch_norm(env):
    fit_model(env, Convolutions)


@program(variants=(*OUR_VARIANTS, DDP))
def weight_normed(env):
    fit_model(env, lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, 9)), nn.Tanh(), mlp(9)))


@program(variants=(*OUR_VARIANTS, DDP))
def spectral_and_orthogonal(env):
    def build():
        spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, 9))
        return nn.Sequential(spectral, nn.Tanh(), parametrizations.orthogonal(nn.Linear(9, 9)), mlp(9))

    fit_model(env, build, torch.optim.SGD)


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@program()
def low_rank_adapters(env):
    fit_model(env, LowRank)


class Embedded(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.embed, self.body = nn.Embedding(19, WIDTH, sparse=sparse), mlp()

    def forward(self, x):
        return self.body(self.embed((x * 5).long() % 19).mean(1))


@program(variants=NO_FSDP2)
def embedding(env):
    fit_model(env, lambda: Embedded(False))


@program(variants=NO_FSDP2)
def sparse_embedding(env):
    fit_model(env, lambda: Embedded(True), torch.optim.SGD)


@program(variants=OURS_ONLY)
def sparse_embedding_bag_in_two_micro_batches(env):
    model = env.model(lambda: nn.Sequential(nn.EmbeddingBag(19, WIDTH, sparse=True, mode="sum"), mlp()))
    optimizer = env.optimizer(model, lr=0.1)
    for step in range(4):
        x, y = env.batch(step)
        optimizer.zero_grad()
        total = 0.0
        for x_part, y_part in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = mse(model((x_part * 5).long() % 19), y_part) / 2
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        env.record(total, model)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = mlp(), mlp()

    def forward(self, x):
        return self.wide(self.narrow(x.float()).double())


@program(variants=OURS_ONLY, tolerance={"rtol": 2e-5, "atol": 2e-6})
def mixed_dtypes(env):
    torch.manual_seed(0)
    model = Mixed()
    model.wide.double()
    fit(env, model, env.optimizer(model, lr=0.1, momentum=0.9))


@program(variants=OURS_ONLY)
def named_parameters_given(env):
    model = env.model(mlp)
    fit(env, model, env.optimizer(model, torch.optim.AdamW, params=lambda m: list(m.named_parameters()), lr=0.02))


@program(variants=OURS_ONLY)
def groups_of_named_parameters(env):
    def groups(model):
        named = list(model.named_parameters())
        return [{"params": named[:3], "lr": 0.05}, {"params": named[3:], "weight_decay": 0.1}]

    model = env.model(mlp)
    fit(env, model, env.optimizer(model, torch.optim.AdamW, params=groups, lr=0.02))


@program(variants=OURS_ONLY)
def only_some_parameters_given(env):
    model = env.model(mlp)
    fit(env, model, env.optimizer(model, params=lambda m: [*m[4].parameters(), m[0].bias], lr=0.3))


@program(variants=OURS_ONLY)
def functional_call(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1, momentum=0.9)
    call = lambda x: torch.func.functional_call(model, dict(model.named_parameters()), x)  # noqa: E731
    fit(env, model, optimizer, forward=call)


@program(variants=OURS_ONLY)
def inner_loop_by_functional_call(env):
    """MAML: a step inside, whose gradients are differentiated again."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.Adam, lr=0.02)
    for step in range(4):
        x, y = env.batch(step)
        weights = dict(model.named_parameters())
        inner = torch.func.functional_call(model, weights, torch.ones_like(x[:2])).pow(2).mean()
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        adapted = {name: w - 0.1 * s for (name, w), s in zip(weights.items(), slopes, strict=True)}
        optimizer.zero_grad()
        loss = mse(torch.func.functional_call(model, adapted, x), y)
        loss.backward()
        optimizer.step()
        env.record(loss, model)


@program(variants=OURS_ONLY)
def ensemble_in_a_module_list(env):
    """Members are called one by one; the container's forward never is."""
    members = env.model(lambda: nn.ModuleList([mlp() for _ in range(3)]))
    optimizer = env.optimizer(members, torch.optim.AdamW, lr=0.02)
    for step in range(5):
        x, y = env.batch(step)
        optimizer.zero_grad()
        loss = sum(mse(member(x), y) for member in members)
        loss.backward()
        optimizer.step()
        env.record(loss, members)


@program(variants=OURS_ONLY)
def weights_used_without_any_forward(env):
    """No module is called: the losses take the weights from the modules."""
    model = env.model(lambda: nn.ModuleDict({"one": nn.Linear(WIDTH, 9), "two": nn.Linear(9, WIDTH)}))
    optimizer = env.optimizer(model, lr=0.3)
    for step in range(5):
        x, y = env.batch(step)
        optimizer.zero_grad()
        hidden = torch.tanh(x @ model["one"].weight.t() + model["one"].bias)
        loss = mse(nn.functional.linear(hidden, model["two"].weight, model["two"].bias), y)
        loss.backward()
        optimizer.step()
        env.record(loss, model)


@program(variants=OURS_ONLY)
def weights_that_change_users(env):
    """From the fourth step on another module uses the first one's weights, whose forward is never called."""

    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.turns = nn.Linear(WIDTH, WIDTH), mlp(), 0

        def forward(self, x):
            if self.turns < 3:
                return self.two(self.one(x))
            return nn.functional.linear(self.two(x), self.one.weight, self.one.bias)

    model = env.model(Changing)

    def count(step):
        model.turns = step + 1

    fit(env, model, env.optimizer(model, lr=0.3), 7, after_step=count)


@program(variants=OURS_ONLY)
def one_layer_used_many_times(env):
    class Looped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            for _ in range(3):
                x = x + self.body(x)
            return x

    fit_model(env, Looped)


@program(variants=OURS_ONLY, is_slow=True)
def compiled(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1, momentum=0.9)
    fit(env, model, optimizer, forward=torch.compile(model, backend="aot_eager"))


@program(variants=OURS_ONLY, is_slow=True)
def compiled_whole_graph(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1, momentum=0.9)
    fit(env, model, optimizer, forward=torch.compile(model, backend="aot_eager", fullgraph=True))


@program(variants=(*OUR_VARIANTS, FSDP2), dtype=torch.float32, same_data=True)
def autocast(env):
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.body(x.float()).to(x.dtype)

    fit_model(env, Cast)


class Autoencoder(nn.Module):
    """PyTorch's VAE example, with given noise."""

    def __init__(self):
        super().__init__()
        self.encode, self.mean, self.log_variance = nn.Linear(WIDTH, 9), nn.Linear(9, 2), nn.Linear(9, 2)
        self.decode = mlp(2)

    def forward(self, x, noise):
        hidden = self.encode(x).tanh()
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        return self.decode(mean + noise * (0.5 * log_variance).exp()), mean, log_variance


@program()
def variational_autoencoder(env):
    model = env.model(Autoencoder)
    optimizer = env.optimizer(model, torch.optim.Adam, lr=0.02)
    for step in range(5):
        x, noise = env.batch(step, (WIDTH,), (2,))
        optimizer.zero_grad()
        out, mean, log_variance = model(x, noise)
        loss = mse(out, x) - 0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).mean()
        loss.backward()
        optimizer.step()
        env.record(loss, model)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(WIDTH, 9), nn.Linear(9, 3), nn.Linear(9, 1)

    def forward(self, x):
        x = self.body(x).tanh()
        return self.actor(x).log_softmax(-1), self.critic(x)[..., 0]


@program(variants=NO_FSDP2)
def actor_critic(env):
    """PyTorch's example: one forward a move, a loss of the whole episode."""
    model = env.model(ActorCritic)
    optimizer = env.optimizer(model, torch.optim.Adam, lr=0.02)
    for step in range(4):
        x, rewards = env.batch(step)
        moves = [model(x + 0.1 * move) for move in range(3)]
        loss = sum(
            (-logits[:, i] * (rewards[:, i] - value.detach())).mean() + mse(value, rewards[:, i])
            for i, (logits, value) in enumerate(moves)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        env.record(loss, model)


@program()
def triplet_of_forwards(env):
    """A siamese network: one model, three forwards, one backward."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    for step in range(4):
        a, b, c = env.batch(step, (WIDTH,), (WIDTH,), (WIDTH,))
        optimizer.zero_grad()
        loss = nn.functional.triplet_margin_loss(model(a), model(b), model(c), margin=5.0)
        loss.backward()
        optimizer.step()
        env.record(loss, model)


@program(variants=OURS_ONLY)
def momentum_contrast(env):
    """MoCo: the key encoder follows the query encoder before each forward."""
    query, key = env.model(mlp), env.seeded(mlp).requires_grad_(False)
    optimizer = env.optimizer(query, lr=0.1, momentum=0.9, weight_decay=1e-3)
    for step in range(6):
        with torch.no_grad():
            for k, q in zip(key.parameters(), query.parameters(), strict=True):
                k.mul_(0.8).add_(q, alpha=0.2)
        x, y = env.batch(step)
        loss = (1 - nn.functional.cosine_similarity(query(x), key(y))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        env.record(loss, query, key)
