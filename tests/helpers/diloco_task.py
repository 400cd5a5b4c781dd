"""A small classification on which DiLoCo over clusters and one process are compared: the same data, model and steps."""

import torch
from torch import nn

STEPS, SYNC_EVERY, GLOBAL_BATCH = 300, 10, 128
FEATURES, CLASSES = 16, 8


def sync_rounds():
    """How often the clusters exchange something."""
    return STEPS // SYNC_EVERY


def make_model():
    """Equal on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES))


def inner_optimizer(model):
    """Of every step, and its schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def batch(step, shard=0, shards=1):
    """(inputs, labels) of a step: this shard of its global batch. Labels are drawn, so no model reaches a loss of 0."""
    generator = torch.Generator().manual_seed(1_000 + step)
    inputs = torch.randn(GLOBAL_BATCH, FEATURES, generator=generator)
    chances = torch.softmax(3 * _teacher(inputs), 1)
    labels = torch.multinomial(chances, 1, generator=generator).squeeze(1)
    return inputs[shard::shards], labels[shard::shards]


def evaluate(model):
    """The mean loss on steps that nobody trained on."""
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(inputs), labels) for inputs, labels in map(batch, range(-40, 0))]
    return torch.stack(losses).mean().item()


def single_process_loss():
    """What one process reaches with all the data of each step."""
    model = make_model()
    optimizer, schedule = inner_optimizer(model)
    for step in range(STEPS):
        inputs, labels = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        schedule.step()
    return evaluate(model)


def _teacher(inputs):
    generator = torch.Generator().manual_seed(7)
    first, second = (torch.randn(*shape, generator=generator) for shape in ((FEATURES, 24), (24, CLASSES)))
    return torch.tanh(inputs @ first / FEATURES**0.5) @ second / 24**0.5
