"""torch DDP over every rank, on both clusters; with --bf16, its gradients are halved on the wire by torch's comm hook.

    holmes testbed run -- python examples/ddp.py           # or with --bf16

Only the backend's name differs from a script for Gloo. The group of all ranks spans the clusters: HOLMES_CLUSTER tells
it where a rank is, so that gradients are first summed inside each cluster on its fast NICs.
"""

import common
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel


def bfloat16_on_the_wire(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook by another name: by its own, DDP takes it with NCCL and a GPU only."""
    return bf16_compress_hook(group, bucket)


def main() -> None:
    """Trains the whole model on every rank."""
    arguments, settings = common.arguments(bf16=False), common.Settings()
    dist.init_process_group(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = common.Batches(settings)
    model = DistributedDataParallel(common.Stage(settings, batches.vocabulary, range(settings.layers)))
    if arguments.bf16:
        model.register_comm_hook(None, bfloat16_on_the_wire)
    optimizer = common.make_optimizer(model, settings)

    def step(number: int):
        inputs, targets = common.share_of_batch(batches, number, rank, size)
        loss = common.loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    common.train(step, arguments.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
