"""One DDP step on all ranks, whoever started them: torchrun, srun, mpirun, mpiexec, Ray Train or Kubernetes.

What differs between launchers is one line: `set_environment` gives torch the variables that torchrun would set.
"""

import sys

import torch
import torch.distributed as dist

from holmes_comm.launch import set_environment


def train() -> None:
    """Joins the job and trains one step; the ranks' weights are equal afterwards. Collective."""
    launch = set_environment()
    if launch is None:
        sys.exit("no launcher started this process as a rank: see docs/launchers.md, and `holmes env`")
    is_ours = not dist.is_initialized()  # Ray Train has made it, and ends it
    if is_ours:
        dist.init_process_group("holmes")
    torch.manual_seed(dist.get_rank())  # DDP sends rank 0's weights
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    weights = [torch.empty_like(model.module.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, model.module.weight.detach())
    same = all(torch.equal(weights[0], weight) for weight in weights)
    backend, place = dist.get_backend(), f"rank {dist.get_rank()} of {dist.get_world_size()}"
    # One write a line, so that lines of ranks do not mix.
    sys.stdout.write(f"{launch.launcher}: {place}, backend {backend}, weights equal: {same}\n")
    if is_ours:
        dist.destroy_process_group()


if __name__ == "__main__":
    train()
