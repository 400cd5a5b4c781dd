"""Training on a GPU over holmes: losses against one process: `python benchmarks/gpu_train.py [--ranks 2] [--dry-run]`.

A small transformer, the same data cut over the ranks, three ways: DDP over `cpu:holmes,cuda:holmes`, the overlapped
optimizer on the same group, and one process with all of the data. The losses must agree. `--dry-run`: on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

STEPS = 20
BATCH = 16
TOLERANCE = 2e-3  # of a loss, in fp32 with sums in another order

sys.path.insert(0, str(Path(__file__).parent))


def model_of(device: Any) -> Any:
    import torch

    torch.manual_seed(7)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(256, 64), torch.nn.TransformerEncoder(layer, 2), torch.nn.Linear(64, 256)
    )
    return model.to(device)


def losses_of(rank: int, size: int, device: Any, wrap: Any) -> list[float]:
    """Mean loss over all ranks of each step."""
    import torch
    import torch.distributed as dist

    model, optimizer = wrap(model_of(device))
    generator = torch.Generator().manual_seed(3)
    share = BATCH // size
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(0, 256, (BATCH, 33), generator=generator)[rank * share : (rank + 1) * share].to(device)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if size > 1:
            dist.all_reduce(mean)
            mean /= size
        losses.append(mean.item())
    return losses


def train(store: Any, rank: int, size: int, device_name: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    import holmes
    from holmes_comm import NicSelection, torch_backend

    # Before CUDA and NCCL start: ranks of one GPU must be of several hosts to NCCL.
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    device = torch.device(device_name)
    torch.set_num_threads(1)
    host, port = os.environ["GPU_TRAIN_STORE"].split(":")
    backend = "cpu:holmes,cuda:holmes"
    dist.init_process_group(
        backend,
        store=dist.TCPStore(host, int(port), is_master=False),
        rank=rank,
        world_size=size,
        pg_options=NicSelection(names=("lo",)),
    )

    def ddp(model: Any) -> tuple[Any, Any]:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-3)

    def overlapped(model: Any) -> tuple[Any, Any]:
        return model, holmes.DistributedOptimizer(model, torch.optim.AdamW, lr=1e-3)

    outcome = {"ddp": losses_of(rank, size, device, ddp), "overlapped": losses_of(rank, size, device, overlapped)}
    descriptions = torch_backend.device_descriptions()
    dist.barrier()
    return outcome | {"communicators": descriptions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    import torch
    import torch.distributed as dist
    from gpu_ranks import launch

    device_name = "cpu" if arguments.dry_run else "cuda:0"
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["GPU_TRAIN_STORE"] = f"127.0.0.1:{server.port}"
    outcome = launch(train, arguments.ranks, device_name)[0]

    def alone(model: Any) -> tuple[Any, Any]:
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    wanted = losses_of(0, 1, torch.device(device_name), alone)
    worst = {
        name: max(abs(a - b) for a, b in zip(outcome[name], wanted, strict=True)) for name in ("ddp", "overlapped")
    }
    print(
        json.dumps(
            {
                "device": device_name,
                "first_loss": wanted[0],
                "last_loss": wanted[-1],
                "largest_difference": worst,
                "communicators": outcome["communicators"],
            },
            indent=1,
        )
    )
    assert wanted[-1] < wanted[0], "it does not learn"
    assert all(difference < TOLERANCE for difference in worst.values()), (
        f"losses differ: {worst}, tolerance {TOLERANCE}"
    )
    assert arguments.dry_run or outcome["communicators"], "nothing went over NCCL"


if __name__ == "__main__":
    main()
