"""The reference: one process, no communication."""

from __future__ import annotations

import torch

from holmes.lab.demo.device import rank_device
from holmes.lab.demo.model import Batches, Stage, loss_of, make_optimizer
from holmes.lab.demo.record import Recorder
from holmes.lab.demo.settings import rank_arguments


def main() -> None:
    """Trains the whole model on the whole batch."""
    settings, _ = rank_arguments()
    torch.set_num_threads(1)
    device = rank_device(settings.device)
    batches = Batches(settings)
    model = Stage(settings, batches.vocabulary, range(settings.layers)).to(device)
    optimizer = make_optimizer(model, settings)
    recorder = Recorder(settings)

    def step(number: int) -> float:
        inputs, targets = (tensor.to(device) for tensor in batches.batch(number))
        with recorder.span("forward"):
            loss = loss_of(model(inputs), targets)
        with recorder.span("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        with recorder.span("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    recorder.train(step)


if __name__ == "__main__":
    main()
