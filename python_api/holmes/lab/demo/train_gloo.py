"""As a user would today: torch DDP over Gloo on the one network that all ranks share."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from holmes.lab.demo.data_parallel import DataParallel
from holmes.lab.demo.device import rank_device
from holmes.lab.demo.model import Batches, Stage, loss_of, make_optimizer
from holmes.lab.demo.record import Recorder
from holmes.lab.demo.settings import rank_arguments


def main() -> None:
    """Data parallel over all ranks."""
    settings, _ = rank_arguments()
    torch.set_num_threads(1)
    device = rank_device(settings.device)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    share = settings.share(size, "data-parallel ranks")
    batches = Batches(settings)
    recorder = Recorder(settings)
    model = Stage(settings, batches.vocabulary, range(settings.layers)).to(device)
    parallel = DataParallel(model, None, settings, recorder)
    optimizer = make_optimizer(model, settings)

    def step(number: int) -> float:
        inputs, targets = (tensor[rank * share :][:share].to(device) for tensor in batches.batch(number))
        with recorder.span("forward"):
            loss = loss_of(parallel.module(inputs), targets)
        with recorder.span("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        parallel.wait()
        with recorder.span("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    dist.barrier()
    recorder.train(step)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of Gloo that are still there at the interpreter's end may end it by SIGABRT


if __name__ == "__main__":
    main()
