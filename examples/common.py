"""What the examples share: a small GPT and text to train it on (those of `holmes demo`), and the loop around a step."""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist

from holmes.lab.demo.model import Batches, Stage, loss_of, make_optimizer
from holmes.lab.demo.settings import Settings

__all__ = ["Batches", "Settings", "Stage", "arguments", "loss_of", "make_optimizer", "share_of_batch", "train"]


def arguments(**options: object) -> argparse.Namespace:
    """--backend, --steps and an example's own: its default by name; False makes a switch."""
    parser = argparse.ArgumentParser()
    for name, default in options.items():
        kind = {"action": "store_true"} if default is False else {"type": type(default), "default": default}
        parser.add_argument(f"--{name}", **kind)
    parser.add_argument("--backend", default="holmes", help="holmes, or gloo to compare with")
    parser.add_argument("--steps", type=int, default=20)
    torch.set_num_threads(1)  # the emulated nodes share this machine's processors
    return parser.parse_args()


def share_of_batch(batches: Batches, step: int, index: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one of `parts` data-parallel ranks."""
    inputs, targets = batches.batch(step)
    return inputs.chunk(parts)[index], targets.chunk(parts)[index]


def train(step: Callable[[int], torch.Tensor | None], steps: int) -> None:
    """Prints each step's loss over the global batch: the mean of the ranks whose step returns one (of equal shares)."""
    for number in range(steps):
        loss = step(number)
        total = torch.tensor([0.0, 0.0] if loss is None else [loss.item(), 1.0], dtype=torch.float64)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {number} loss {total[0] / total[1]:.6f}", flush=True)
