"""What the layouts are compared with: the demo's GPT trained in this process alone."""

import torch

from holmes.lab.demo.model import Batches, Stage, loss_of, make_optimizer


def single_process_losses(settings, steps, make_scheduler=None):
    """The loss of each step; `make_scheduler(optimizer)` makes a learning-rate scheduler."""
    torch.set_num_threads(1)  # on shared processors two threads that wait for each other are far slower than one
    batches = Batches(settings)
    model = Stage(settings, batches.vocabulary, range(settings.layers))
    optimizer = make_optimizer(model, settings)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    losses = []
    for step in range(steps):
        inputs, targets = batches.batch(step)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return losses
