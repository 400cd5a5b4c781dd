"""The table of training programs, and the loop and the models that most of them share."""

from harness import DDP, FSDP2, OUR_VARIANTS, VARIANTS, WIDTH, Program
from torch import nn

TABLE = {}
OURS_ONLY = OUR_VARIANTS
NO_FSDP2 = (*OUR_VARIANTS, DDP)
NO_DDP = (*OUR_VARIANTS, FSDP2)

mse = nn.functional.mse_loss


def program(**options):
    """Adds a function of an Env to the table; `options` are Program's."""

    def add(train):
        TABLE[train.__name__] = Program(train.__name__, train, **{"variants": VARIANTS, **options})
        return train

    return add


def mlp(inputs=WIDTH, outputs=WIDTH):
    return nn.Sequential(nn.Linear(inputs, 17), nn.Tanh(), nn.Linear(17, 9), nn.Tanh(), nn.Linear(9, outputs))


def fit(env, model, optimizer, steps=5, *, start=0, after_backward=None, after_step=None, forward=None):
    """The usual loop. The callbacks are called with the step."""
    for step in range(start, start + steps):
        x, y = env.batch(step)
        optimizer.zero_grad()
        loss = mse((forward or model)(x), y)
        loss.backward()
        if after_backward is not None:
            after_backward(step)
        optimizer.step()
        if after_step is not None:
            after_step(step)
        env.record(loss, model)
