"""Training as trainers write it: the loops of PyTorch's, Megatron's, Lightning's and Accelerate's examples."""

import copy

import changes  # noqa: F401  (adds to the table)
import refusals  # noqa: F401
import torch
import trials  # noqa: F401
import uneven_ranks  # noqa: F401
import varied_models  # noqa: F401
from harness import DDP, WIDTH
from table import NO_DDP, NO_FSDP2, OURS_ONLY, TABLE, fit, mlp, mse, program
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn


def program_of(name):
    return TABLE[name]


# --- plain loops, accumulation, clipping ---


@program()
def plain_sgd(env):
    model = env.model(mlp)
    fit(env, model, env.optimizer(model, lr=0.1))


@program(dtype=torch.float32)
def adamw_float32(env):
    model = env.model(mlp)
    fit(env, model, env.optimizer(model, torch.optim.AdamW, lr=0.01, eps=1e-3))


@program()
def zero_grad_after_step(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.Adam, lr=0.01)
    for step in range(5):
        x, y = env.batch(step)
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        env.record(loss, model)


def accumulate(env, model, optimizer, counts, announce):
    for step, count in enumerate(counts):
        x, y = env.batch(step, rows=16)
        optimizer.zero_grad()
        total = 0.0
        for number, (x_part, y_part) in enumerate(zip(x.chunk(count), y.chunk(count), strict=True)):
            loss = mse(model(x_part), y_part) / count
            if announce and number < count - 1:
                with env.no_sync(model, optimizer):
                    loss.backward()
            else:
                loss.backward()
            total = total + loss.detach()
        optimizer.step()
        env.record(total, model)


@program()
def accumulation_by_count(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.01)
    accumulate(env, model, optimizer, [4] * 4, announce=not env.is_ours)


@program()
def accumulation_in_no_sync(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.01)
    accumulate(env, model, optimizer, [2, 4, 1, 2], announce=True)


@program(variants=OURS_ONLY)
def accumulation_that_changes(env):
    """The last window of an epoch is shorter."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.05, momentum=0.9, ours={"accumulation_steps": 4})
    for step, count in enumerate([4, 4, 2, 4, 1]):
        if env.is_ours:
            optimizer.accumulation_steps = count
        x, y = env.batch(step, rows=16)
        total = 0.0
        for x_part, y_part in zip(x.chunk(count), y.chunk(count), strict=True):
            loss = mse(model(x_part), y_part) / count
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        env.record(total, model)


@program()
def clipped_by_norm(env):
    model = env.model(mlp)
    fit(env, model, env.optimizer(model, torch.optim.AdamW, lr=0.01, clip=0.05))


@program(variants=NO_DDP)
def two_losses_two_backwards(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    for step in range(4):
        x, y = env.batch(step)
        optimizer.zero_grad()
        out = model(x)
        mse(out, y).backward(retain_graph=True)
        loss = out.pow(4).mean()
        loss.backward()
        optimizer.step()
        env.record(loss, model)


@program()
def closure(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.RMSprop, lr=0.01)
    for step in range(4):
        x, y = env.batch(step)

        def evaluate(x=x, y=y):
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            return loss

        env.record(optimizer.step(evaluate), model)


# --- settings that change ---


def scheduled(env, make_scheduler, optimizer_class=torch.optim.SGD, *, between=False, **settings):
    model = env.model(mlp)
    optimizer = env.optimizer(model, optimizer_class, **settings)
    scheduler = make_scheduler(optimizer)
    callback = {"after_backward" if between else "after_step": lambda _: scheduler.step()}
    fit(env, model, optimizer, 7, **callback)


@program()
def cosine_schedule(env):
    scheduled(env, lambda o: lr_scheduler.CosineAnnealingLR(o, 7), torch.optim.AdamW, lr=0.02)


@program()
def warm_restarts(env):
    scheduled(env, lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2), lr=0.1, momentum=0.9, nesterov=True)


@program()
def one_cycle_moves_betas(env):
    scheduled(env, lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=8), torch.optim.Adam, lr=0.01)


@program()
def cyclic_moves_momentum(env):
    scheduled(env, lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2), lr=0.1, momentum=0.9)


@program()
def warmup_then_decay(env):
    def make(optimizer):
        warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        decay = lr_scheduler.ExponentialLR(optimizer, 0.8)
        return lr_scheduler.SequentialLR(optimizer, [warmup, decay], [3])

    scheduled(env, make, lr=0.2)


@program()
def noam_steps_between_backward_and_step(env):
    rate = lambda step: (step + 1) ** -0.5 * min(1.0, (step + 1) / 4)  # noqa: E731
    scheduled(env, lambda o: lr_scheduler.LambdaLR(o, rate), torch.optim.Adam, between=True, lr=0.05)


@program(variants=NO_FSDP2)
def rate_is_a_tensor(env):
    rate = lambda step: (step + 1) ** -0.5  # noqa: E731
    settings = {"lr": torch.tensor(0.05), "between": True, "foreach": False}
    scheduled(env, lambda o: lr_scheduler.LambdaLR(o, rate), torch.optim.Adam, **settings)


@program(variants=NO_FSDP2)
def rate_is_a_tensor_filled_in_place(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=torch.tensor(0.01), foreach=False)
    fit(env, model, optimizer, after_backward=lambda step: optimizer.param_groups[0]["lr"].fill_(0.01 * (step + 1)))


@program()
def plateau(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
    for step in range(6):
        x, y = env.batch(step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step(env.all_reduce(loss.detach().clone()).item())
        env.record(loss, model)


@program()
def settings_edited_between_backward_and_step(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.01)

    def edit(step):
        group = optimizer.param_groups[0]
        group["lr"], group["weight_decay"], group["betas"] = 0.01 * (1 + step % 3), 0.1 * step, (0.9 - 0.1 * step, 0.99)

    fit(env, model, optimizer, after_backward=edit)


@program()
def weight_decay_for_matrices_only(env):
    def groups(model):
        return [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
        ]

    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, params=groups, lr=0.01)
    halve = lambda step: [group.update(lr=group["lr"] * 0.7) for group in optimizer.param_groups]  # noqa: E731
    fit(env, model, optimizer, after_step=halve)


# --- what is done between backward and step ---


@program()
def metric_between_backward_and_step(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.01)
    for step in range(20):
        x, y = env.batch(step)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        with torch.no_grad():
            metric = (model(x) - y).abs().mean()
        optimizer.step()
        env.record(metric, model)


@program()
def loss_reduced_between_backward_and_step(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    for step in range(10):
        x, y = env.batch(step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        logged = env.all_reduce(loss.detach().clone())
        optimizer.step()
        env.record(logged, model)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.one, self.two = mlp(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, heads=(1, 2)):
        x = self.body(x)
        return x + (self.one(x) if 1 in heads else 0) + (self.two(x) if 2 in heads else 0)


@program(variants=NO_FSDP2)
def head_unused_on_some_ranks_and_loss_reduced(env):
    model = env.model(TwoHeads, find_unused_parameters=True)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.01)
    for step in range(8):
        optimizer.zero_grad()
        x, y = env.batch(step)
        losses = [
            mse(model(part, heads=[1 + (rank + step) % 2, 1][: 1 + (step > 4)]), wanted)
            for rank, part, wanted in env.parts(x, y)
        ]
        loss = sum(losses) / len(losses)
        loss.backward()
        env.all_reduce(loss.detach().clone())
        optimizer.step()
        env.record(loss, model)


@program(variants=NO_FSDP2)
def heads_take_turns(env):
    take_turns(env, torch.optim.Adam, lr=0.01)


@program(variants=NO_FSDP2)
def heads_take_turns_with_momentum(env):
    """torch's fused SGD fails where some parameters have a momentum and others none yet; its default does not."""
    take_turns(env, torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.2, ours={"bucket_bytes": 1 << 20})


@program(variants=OURS_ONLY)
def momentum_begins_in_different_steps(env):
    """Of parameters of one bucket, none of which had a gradient in the first step."""
    model = env.model(lambda: nn.ModuleList([mlp() for _ in range(4)]))
    optimizer = env.optimizer(model, lr=0.05, momentum=0.9, ours={"bucket_bytes": 1 << 20})
    for step, used in enumerate([(0, 1), (0, 2), (0, 2, 3), (1, 3)]):
        x, y = env.batch(step)
        optimizer.zero_grad()
        loss = sum(mse(model[number](x), y) for number in used)
        loss.backward()
        optimizer.step()
        env.record(loss, model)


@program(variants=OURS_ONLY)
def optimizers_come_and_go(env):
    model = env.model(lambda: nn.ModuleList([mlp() for _ in range(3)]))
    optimizers = [env.optimizer(m, lr=0.05) for m in model]
    for step in range(5):
        if env.is_ours and step:
            optimizers[step % 3].close()
            optimizers[step % 3] = env.optimizer(model[step % 3], lr=0.05)
        x, y = env.batch(step)
        loss = sum(mse(m(x), y) for m in model)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        env.record(loss, model)


def take_turns(env, optimizer_class, **settings):
    model = env.model(TwoHeads, find_unused_parameters=True)
    optimizer = env.optimizer(model, optimizer_class, **settings)
    for step in range(7):
        x, y = env.batch(step)
        optimizer.zero_grad()
        loss = mse(model(x, heads=[(1,), (1,), (2,), (1, 2), ()][step % 5]), y)
        loss.backward()
        optimizer.step()
        env.record(loss, model)


@program()
def bad_batches_are_skipped_by_zero_grad(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.01)
    for step in range(7):
        x, y = env.batch(step)
        loss = mse(model(x), y)
        loss.backward()
        if step not in (2, 3, 5):
            optimizer.step()
        optimizer.zero_grad()
        env.record(loss, model)


@program(variants=NO_FSDP2)
def zero_grad_before_the_first_step(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1, momentum=0.9)
    mse(model(env.batch(50)[0]), env.batch(50)[1]).backward()
    optimizer.zero_grad()
    fit(env, model, optimizer)


@program(variants=NO_FSDP2)
def step_before_any_backward(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.Adam, lr=0.1)
    optimizer.step()
    fit(env, model, optimizer)
    optimizer.zero_grad()
    optimizer.step()
    fit(env, model, optimizer, 2, start=5)


@program()
def input_gradients_after_backward(env):
    """autograd.grad through the graph that backward has just gone through."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.3)
    for step in range(5):
        x, y = env.batch(step)
        x.requires_grad_()
        optimizer.zero_grad()
        out = model(x)
        mse(out, y).backward(retain_graph=True)
        (slope,) = torch.autograd.grad(out.pow(2).mean(), x)
        optimizer.step()
        env.record(slope.pow(2).sum() * len(x) ** 2 / len(x), model)


def cleared(env, clear):
    """A step without gradients changes nothing."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02)
    fit(env, model, optimizer, 6, after_backward=lambda step: clear(model) if step in (1, 2, 4) else None)


def zeroed(env, clear, optimizer_class=torch.optim.SGD, **settings):
    """Most steps use a part of the model only; the other part's gradients are zeros then, not None."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, optimizer_class, lr=0.05, weight_decay=0.1, **settings)
    for step in range(7):
        x, y = env.batch(step)
        loss = mse(model(x), y) if step % 3 == 0 else mse(model[2:](x @ torch.ones(WIDTH, 17, dtype=x.dtype)), y)
        loss.backward()
        optimizer.step()
        clear(model, optimizer)
        env.record(loss, model)


@program(variants=OURS_ONLY)
def zero_grad_to_zeros_with_unused_parameters(env):
    zeroed(env, lambda _, optimizer: optimizer.zero_grad(set_to_none=False), momentum=0.9)


@program(variants=OURS_ONLY)
def model_zero_grad_to_zeros_with_unused_parameters(env):
    zeroed(env, lambda model, _: model.zero_grad(set_to_none=False), torch.optim.AdamW)


@program(variants=OURS_ONLY)
def zeros_dropped_between_and_after(env):
    """A backward pass whose gradients are zeroed; and a step with nothing but zeros."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.05, weight_decay=0.1, momentum=0.9)
    for step in range(6):
        x, y = env.batch(step)
        loss = mse(model(x), y)
        loss.backward()
        if step % 2:
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 == 0)
        env.record(loss, model)


@program(variants=OURS_ONLY, same_data=True, dtype=torch.float32)
def zero_grad_to_zeros_with_reduce_dtype(env):
    zeroed(env, lambda model, _: model.zero_grad(set_to_none=False), ours={"reduce_dtype": torch.float64})


@program(variants=OURS_ONLY)
def gan_whose_critic_is_never_cleared_in_between(env):
    """The generator's loss adds to gradients that were stepped with, and are dropped before the critic's next step."""
    generator, critic = env.model(mlp), env.model(lambda: mlp(outputs=1))
    g, d = (env.optimizer(m, torch.optim.Adam, lr=0.01) for m in (generator, critic))
    for step in range(5):
        x, _ = env.batch(step)
        critic.zero_grad()
        loss = (critic(x) - 1).pow(2).mean() + critic(generator(noise(env, step)).detach()).pow(2).mean()
        loss.backward(create_graph=step == 2)
        d.step()
        for _ in range(2):
            generator.zero_grad()
            g_loss = (critic(generator(noise(env, step))) - 1).pow(2).mean()
            g_loss.backward(create_graph=step == 3)
            g.step()
        env.record(loss + g_loss, generator, critic)


@program(variants=OURS_ONLY)
def model_zero_grad_instead_of_optimizers(env):
    cleared(env, lambda model: model.zero_grad())


@program(variants=OURS_ONLY)
def gradients_set_to_none_before_step(env):
    def clear(model):
        for p in model.parameters():
            p.grad = None

    cleared(env, clear)


def cleared_with_heads(env, heads_of, **ours):
    """Cleared when some buckets have been sent and others, with a head that was not used, have not."""
    model = env.model(TwoHeads)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02, eps=1e-3, ours=ours)
    for step in range(8):
        optimizer.zero_grad()
        parts = env.parts(*env.batch(step))
        losses = [mse(model(x, heads=heads_of(rank, step)), y) for rank, x, y in parts]
        loss = sum(losses) / len(losses)
        loss.backward()
        if step in (2, 3, 6):
            model.zero_grad()
        optimizer.step()
        env.record(loss, model)


@program(variants=OURS_ONLY)
def cleared_where_ranks_use_other_heads(env):
    cleared_with_heads(env, lambda rank, step: (1, 2) if step < 2 else (1 + (rank + step) % 2,))


@program(variants=OURS_ONLY)
def cleared_where_a_head_is_unused(env):
    cleared_with_heads(env, lambda rank, step: (1, 2) if step % 4 < 2 else (1,), bucket_bytes=1 << 16)


@program(variants=OURS_ONLY, dtype=torch.float32, same_data=True, tolerance={"rtol": 1e-4, "atol": 1e-5})
def cleared_where_a_head_is_unused_and_gradients_are_wider(env):
    options = {"bucket_bytes": 1 << 16, "reduce_dtype": torch.float64}
    cleared_with_heads(env, lambda rank, step: (1, 2) if step % 4 < 2 else (1,), **options)


@program(variants=OURS_ONLY)
def parameter_gradients_between_backward_and_step(env):
    """As gradient surgery, GradNorm and Fisher estimates take them: of another loss, by autograd.grad."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.3, momentum=0.9)
    for step in range(6):
        x, y = env.batch(step)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        slopes = torch.autograd.grad(mse(model(y), x), list(model.parameters()))
        optimizer.step()
        env.record(slopes[0].sum() + slopes[-1].mean(), model)


@program(variants=OURS_ONLY)
def frozen_later(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02, weight_decay=0.1)

    def freeze(step):
        model[0].requires_grad_(step not in (1, 2))
        model[2].bias.requires_grad_(step < 4)

    fit(env, model, optimizer, 7, after_step=freeze)


@program(variants=OURS_ONLY)
def encoder_used_under_no_grad_between(env):
    """A second loss, of a head with its own optimizer, on features of the encoder between its backward and step."""
    encoder, head = env.model(mlp), env.model(lambda: nn.Linear(WIDTH, WIDTH))
    optimizer, head_optimizer = env.optimizer(encoder, lr=0.3), env.optimizer(head, lr=0.1)
    for step in range(6):
        x, y = env.batch(step)
        optimizer.zero_grad()
        head_optimizer.zero_grad()
        mse(encoder(x), y).backward()
        with torch.no_grad():
            features = encoder(y)
        loss = mse(head(features), x)
        loss.backward()
        optimizer.step()
        head_optimizer.step()
        env.record(loss, encoder, head)


# --- several models ---


def noise(env, step):
    return env.batch(1000 + step)[0]


@program()
def gan(env):
    """As in PyTorch's DCGAN: the generator's loss leaves gradients in the discriminator, which are dropped."""
    bce = nn.functional.binary_cross_entropy_with_logits
    generator, critic = env.model(mlp), env.model(lambda: mlp(outputs=1))
    g, d = (env.optimizer(m, torch.optim.Adam, lr=0.01, betas=(0.5, 0.999)) for m in (generator, critic))
    for step in range(5):
        x, _ = env.batch(step)
        ones = torch.ones(len(x), 1, dtype=x.dtype)
        fake = generator(noise(env, step))
        d.zero_grad()
        loss = bce(critic(x), ones) + bce(critic(fake.detach()), 0 * ones)
        loss.backward()
        d.step()
        g.zero_grad()
        g_loss = bce(critic(fake), ones)
        g_loss.backward()
        g.step()
        env.record(loss + g_loss, generator, critic)


@program(variants=OURS_ONLY)
def gan_with_a_frozen_critic(env):
    """As Lightning's toggle_optimizer does: the other model's parameters want no gradients meanwhile."""
    generator, critic = env.model(mlp), env.model(lambda: mlp(outputs=1))
    g, d = (env.optimizer(m, torch.optim.Adam, lr=0.01) for m in (generator, critic))
    for step in range(6):
        x, _ = env.batch(step)
        critic.requires_grad_(False)
        g_loss = critic(generator(noise(env, step))).pow(2).mean()
        g_loss.backward()
        g.step()
        g.zero_grad()
        critic.requires_grad_(True)
        loss = (critic(x) - 1).pow(2).mean() + critic(generator(noise(env, step)).detach()).pow(2).mean()
        loss.backward()
        d.step()
        d.zero_grad()
        env.record(loss + g_loss, generator, critic)


@program(variants=NO_FSDP2)
def wgan_clamps_weights(env):
    critic = env.model(lambda: mlp(outputs=1))
    optimizer = env.optimizer(critic, torch.optim.RMSprop, lr=0.01)
    for step in range(6):
        x, fake = env.batch(step)
        optimizer.zero_grad()
        loss = critic(fake).mean() - critic(x).mean()
        loss.backward()
        optimizer.step()
        for p in critic.parameters():
            p.data.clamp_(-0.1, 0.1)
        env.record(loss, critic)


@program(variants=OURS_ONLY)
def gradient_penalty(env):
    critic = env.model(lambda: mlp(outputs=1))
    optimizer = env.optimizer(critic, torch.optim.Adam, lr=0.01)
    for step in range(5):
        x, fake = env.batch(step)
        x = x.lerp(fake, 0.3).requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        loss = (slope.norm(dim=1) - 1).pow(2).mean() + critic(fake).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        env.record(loss, critic)


@program(variants=NO_FSDP2)
def distillation(env):
    teacher = env.seeded(mlp).requires_grad_(False).eval()
    student = env.model(lambda: nn.Linear(WIDTH, WIDTH))
    optimizer = env.optimizer(student, lr=0.1, momentum=0.9, dampening=0.3)
    for step in range(4):
        x, y = env.batch(step)
        out = student(x)
        loss = mse(out, y) + nn.functional.kl_div(out.log_softmax(1), teacher(x).softmax(1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        env.record(loss, student)


@program(variants=NO_FSDP2)
def target_network(env):
    """As in deep Q-learning: a copy that follows, made and renewed by deepcopy, load_state_dict and Polyak averages."""
    model = env.model(mlp)
    bare = model.module if env.variant == DDP else model
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.01)
    target = env.seeded(mlp)
    for step in range(8):
        x, y = env.batch(step)
        with torch.no_grad():
            wanted = y + 0.9 * target(x)
        loss = nn.functional.smooth_l1_loss(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 3:
            target.load_state_dict(bare.state_dict())
        elif step == 5:
            target = copy.deepcopy(bare)
        else:
            for old, new in zip(target.parameters(), bare.parameters(), strict=True):
                old.data.copy_(0.7 * old.data + 0.3 * new.data)
        env.record(loss, model, target)


# --- averages of parameters ---


@program(variants=NO_FSDP2)
def ema_by_averaged_model(env):
    model = env.model(mlp)
    bare = model.module if env.variant == DDP else model
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.01)
    average = AveragedModel(bare, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    fit(env, model, optimizer, after_step=lambda _: average.update_parameters(bare))
    env.record(mse(average(env.batch(0)[0]), env.batch(0)[1]), model, average)


@program(variants=NO_FSDP2)
def ema_by_hand(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    averages = nn.ParameterList([p.detach().clone() for p in model.parameters()])

    @torch.no_grad()
    def update(step):
        for average, p in zip(averages, model.parameters(), strict=True):
            average.lerp_(p, 0.2)

    fit(env, model, optimizer, after_step=update)
    env.record(torch.zeros(()), model, averages)


@program(variants=NO_FSDP2)
def ema_by_foreach(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.Adam, lr=0.01)
    averages = [p.detach().clone() for p in model.parameters()]
    parameters = [p.detach() for p in model.parameters()]

    def update(step):
        torch._foreach_mul_(averages, 0.7)
        torch._foreach_add_(averages, [p.data for p in model.parameters()], alpha=0.3)

    fit(env, model, optimizer, after_step=update)
    del parameters
    env.record(torch.stack([a.sum() for a in averages]).sum(), model)


@program(variants=NO_FSDP2)
def stochastic_weight_averaging(env):
    model = env.model(mlp)
    bare = model.module if env.variant == DDP else model
    optimizer = env.optimizer(model, lr=0.1, momentum=0.9)
    average = AveragedModel(bare)
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)

    def update(step):
        if step > 1:
            average.update_parameters(bare)
            scheduler.step()

    fit(env, model, optimizer, 6, after_step=update)
    env.record(torch.zeros(()), model, average)


# --- validation, hooks, adversaries ---


@program()
def validation_between_steps(env):
    model = env.model(lambda: nn.Sequential(mlp(), nn.Dropout(0.0), nn.Linear(WIDTH, WIDTH)))
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.01)
    for step in range(5):
        model.train()
        x, y = env.batch(step)
        mse(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.inference_mode() if env.is_ours or env.is_plain else torch.no_grad():
            loss = mse(model(y), x).clone()
        env.record(loss.clone(), model)


@program(variants=NO_FSDP2)
def adversarial_training(env):
    """The first backward is for the inputs' gradients only; the parameters' are dropped."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1)
    for step in range(5):
        x, y = env.batch(step)
        x.requires_grad_()
        mse(model(x), y).backward()
        worse = x.detach() + 0.1 * x.grad.sign()
        optimizer.zero_grad()
        loss = mse(model(worse), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        env.record(loss, model)


@program(variants=OURS_ONLY)
def tensor_hooks_change_gradients(env):
    model = env.model(mlp)
    for p in model.parameters():
        p.register_hook(lambda g: 0.5 * g)
    optimizer = env.optimizer(model, lr=0.2)
    model[0].weight.register_hook(lambda g: g * 3)
    fit(env, model, optimizer, after_step=lambda s: model[2].bias.register_hook(lambda g: -g) if s == 2 else None)


@program(variants=OURS_ONLY)
def post_accumulate_hooks_change_gradients(env):
    model = env.model(mlp)

    def scale_by(factor):
        def hook(parameter):
            parameter.grad.mul_(factor)

        return hook

    model[0].bias.register_post_accumulate_grad_hook(scale_by(2))
    optimizer = env.optimizer(model, lr=0.2)
    model[0].weight.register_post_accumulate_grad_hook(scale_by(0.5))

    def later(step):
        if step == 1:
            model[4].weight.register_post_accumulate_grad_hook(scale_by(-1))

    fit(env, model, optimizer, after_step=later)


@program(variants=NO_FSDP2)
def module_hooks(env):
    model = env.model(mlp)
    bare = model.module if env.variant == DDP else model
    bare[2].register_full_backward_hook(lambda module, grads, _: tuple(2 * g for g in grads))
    bare[4].register_forward_hook(lambda module, args, out: out * 1.5)
    bare[0].register_forward_pre_hook(lambda module, args: (args[0] + module.bias.sum(),))
    fit(env, model, env.optimizer(model, lr=0.05))


@program(variants=NO_FSDP2)
def optimizer_step_hooks(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.Adam, lr=0.05)
    optimizer.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(lr=o.param_groups[0]["lr"] * 0.8))

    @torch.no_grad()
    def bound(*_):
        for p in model.parameters():
            p.clamp_(-0.3, 0.3)

    optimizer.register_step_post_hook(bound)
    fit(env, model, optimizer)


@program(variants=OURS_ONLY)
def bounded_by_way_of_param_groups(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.3)

    @torch.no_grad()
    def bound(step):
        for group in optimizer.param_groups:
            torch._foreach_mul_(group["params"], 0.95)
            for p in group["params"]:
                p.copy_(p.clamp(-0.2, 0.2))

    fit(env, model, optimizer, after_step=bound)


@program(variants=OURS_ONLY, dtype=torch.float16, same_data=True)
def loss_scaled(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.1, momentum=0.9, ours={"loss_scale": 64.0, "reduce_dtype": torch.float32})
    for step in range(5):
        x, y = env.batch(step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        env.scale(optimizer, loss).backward()
        optimizer.step()
        env.record(loss, model)


@program(variants=OURS_ONLY)
def overflows_are_skipped(env):
    """What GradScaler does, by loss_scale="dynamic"."""
    model = env.model(mlp)
    optimizer = env.optimizer(model, torch.optim.AdamW, lr=0.02, clip=0.1, ours={"loss_scale": "dynamic"})
    for step in range(7):
        x, y = env.batch(step)
        optimizer.zero_grad()
        overflows = step in (1, 3, 4)
        loss = mse(model(x), y) * (float("inf") if overflows and env.rank == 0 else 1)
        env.scale(optimizer, loss).backward()
        if not (overflows and env.is_plain):
            optimizer.step()
        env.record(torch.zeros(()) if overflows else loss, model)


@program(variants=NO_FSDP2)
def parameter_norm_is_logged(env):
    model = env.model(mlp)
    optimizer = env.optimizer(model, lr=0.3, momentum=0.5)
    for step in range(5):
        x, y = env.batch(step)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        norm = torch.nn.utils.get_total_norm([p.detach() for p in model.parameters()])
        env.record(norm + torch.cat([p.flatten() for p in model.parameters()]).abs().mean(), model)
