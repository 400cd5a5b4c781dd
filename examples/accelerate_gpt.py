"""Hugging Face Accelerate, by environment only: nothing here names a backend.

HOLMES_REPLACES=gloo holmes testbed run -- python examples/accelerate_gpt.py
"""

import common
import torch.distributed as dist
from accelerate import Accelerator


def main() -> None:
    """Trains the whole model on every rank."""
    arguments, settings = common.arguments(), common.Settings()
    accelerator = Accelerator(cpu=True)
    if dist.get_backend() != arguments.backend:
        raise SystemExit(
            f"--backend {arguments.backend}, but the groups are made by {dist.get_backend()}: set HOLMES_REPLACES=gloo "
            "for holmes, and leave it out for gloo"
        )
    rank, size = accelerator.process_index, accelerator.num_processes
    batches = common.Batches(settings)
    model = common.Stage(settings, batches.vocabulary, range(settings.layers))
    model, optimizer = accelerator.prepare(model, common.make_optimizer(model, settings))
    if accelerator.is_main_process:
        print(f"groups are made by {dist.get_backend()}", flush=True)

    def step(number: int):
        inputs, targets = common.share_of_batch(batches, number, rank, size)
        loss = common.loss_of(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        return loss

    common.train(step, arguments.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
