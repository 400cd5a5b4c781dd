"""One rank of a torch.distributed job over RDMA: `torch_rdma_worker.py TRANSPORT`, started with torchrun's variables.

Trains with DDP beside the same steps on all ranks' data, and reduces and sends tensors; prints how many packets the HCA
has sent meanwhile, and the transports of the data connections.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holmes_comm.torch_backend  # noqa: F401  (registers the backend)
from holmes_comm import NicSelection

COUNTER = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts")
STEPS = 3


def model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 8)).double()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    options = {"generator": generator, "dtype": torch.float64}
    return torch.randn(16, 256, **options), torch.randn(16, 8, **options)


def train(rank: int, size: int) -> int:
    """DDP's parameters are those of one process with all ranks' data; returns bytes of gradients a step."""
    parallel, alone = DistributedDataParallel(model()), model()
    optimizers = [torch.optim.SGD(of.parameters(), lr=0.1, momentum=0.9) for of in (parallel, alone)]
    for step in range(STEPS):
        inputs, targets = batch(rank, step)
        torch.nn.functional.mse_loss(parallel(inputs), targets).backward()
        everyone = [batch(other, step) for other in range(size)]
        inputs, targets = (torch.cat(part) for part in zip(*everyone, strict=True))
        torch.nn.functional.mse_loss(alone(inputs), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, right in zip(parallel.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-12)
    return sum(one.numel() * one.element_size() for one in alone.parameters())


def exchange(rank: int, size: int) -> None:
    for count in (1, 1000, 400_003):
        data = torch.arange(count, dtype=torch.int64) * (rank + 1)
        dist.all_reduce(data)
        assert torch.equal(data, torch.arange(count) * (size * (size + 1) // 2))
        arriving = torch.empty(count, dtype=torch.int64)
        work = dist.irecv(arriving, (rank - 1) % size)
        assert work is not None
        dist.send(torch.arange(count) + rank, (rank + 1) % size)
        work.wait()
        assert torch.equal(arriving, torch.arange(count) + (rank - 1) % size)


def main() -> None:
    torch.set_num_threads(1)
    selection = NicSelection(names=("rxe0",), transport=sys.argv[1])
    dist.init_process_group("holmes", timeout=timedelta(seconds=120), pg_options=selection)
    rank, size = dist.get_rank(), dist.get_world_size()
    before = int(COUNTER.read_text())
    gradient_bytes = train(rank, size)
    exchange(rank, size)
    dist.barrier()
    group = dist.distributed_c10d._get_default_group()
    rows = [row for row in group._get_backend(torch.device("cpu")).connections() if row["purpose"] != "control"]
    print(f"USED {sorted({(row['transport'], row['interface']) for row in rows})}")
    print(f"PACKETS {int(COUNTER.read_text()) - before} for {STEPS * gradient_bytes} bytes")
    dist.destroy_process_group()
    print(f"DONE {rank}")


main()
