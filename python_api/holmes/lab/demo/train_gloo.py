"""As a user would today: torch DDP over Gloo on the one network that all ranks share."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holmes.lab.demo.data import Batches
from holmes.lab.demo.device import rank_device
from holmes.lab.demo.model import Stage, loss_of, make_optimizer
from holmes.lab.demo.record import Recorder
from holmes.lab.demo.settings import Settings, rank_arguments


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


if __name__ == "__main__":
    main()


class DataParallel:
    """`module` is torch DDP over `group` (None: the world); call `wait` before the optimizer uses the gradients.

    DDP alone waits at the end of its backward pass; a pipeline stage would then keep its predecessor waiting for the
    input gradient until the data-parallel traffic is over.
    """

    def __init__(
        self, module: torch.nn.Module, group: dist.ProcessGroup | None, settings: Settings, recorder: Recorder
    ) -> None:
        # Gradients are views of the buckets: what arrives there later is in them.
        self.module = DistributedDataParallel(
            module, process_group=group, bucket_cap_mb=settings.bucket_mib, gradient_as_bucket_view=True
        )
        self._pending: list[dist.Work] = []

        def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            started = time.monotonic()
            buffer = bucket.buffer().div_(dist.get_world_size(group))
            work = dist.all_reduce(buffer, group=group, async_op=True)
            work.get_future().add_done_callback(lambda _: recorder.add("data parallel", started))
            self._pending.append(work)
            launched: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            launched.set_result(buffer)
            return launched

        self.module.register_comm_hook(None, hook)

    def wait(self) -> None:
        """Waits until the gradients are averaged over the group."""
        for work in self._pending:
            work.wait()
        self._pending.clear()
