"""torch FSDP2: parameters sharded inside each cluster, on its fast NICs; only their gradients' sums cross between.

    holmes testbed run -- python examples/fsdp2.py

`gather_topology` finds which ranks are in which cluster; a mesh of them is all that `fully_shard` needs for it (HSDP).
"""

import common
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import holmes


def main() -> None:
    """Trains the model sharded inside each cluster."""
    arguments, settings = common.arguments(), common.Settings()
    dist.init_process_group(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    clusters = holmes.gather_topology().clusters
    mesh = DeviceMesh("cpu", [cluster.ranks for cluster in clusters], mesh_dim_names=("replicate", "shard"))
    batches = common.Batches(settings)
    model = common.Stage(settings, batches.vocabulary, range(settings.layers))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
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
