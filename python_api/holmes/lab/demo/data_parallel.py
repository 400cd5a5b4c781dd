"""Data parallel: torch DDP whose traffic is awaited just before the optimizer."""

# torch checks the annotations of a communication hook, so no "from __future__ import annotations" here.
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holmes.lab.demo.record import Recorder
from holmes.lab.demo.settings import Settings


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
