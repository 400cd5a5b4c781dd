"""A program that knows nothing of Holmes, on NCCL's own host half: torchrun starts it for `real_nccl.sh`.

Two ranks of PyTorch's ProcessGroupNCCL exchange messages over the network that the environment names, and compare what
arrives. A collective is refused: only the kernel for messages has a stand-in. NCCL's log tells which NICs.
"""

import os
import statistics
import time

import torch
import torch.distributed as dist

ROUNDS = 7
SIZES_BYTES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
rank, other = dist.get_rank(), 1 - dist.get_rank()
for size_bytes in SIZES_BYTES:
    mine = torch.full((size_bytes // 4,), rank + 1.0, device=device)
    received = torch.zeros(size_bytes // 4).to(device)
    times_s = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        peers = dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, received, other)
        for work in dist.batch_isend_irecv(list(peers)):
            work.wait()
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start)
    found = received.cpu().unique().tolist()
    assert found == [other + 1.0], (size_bytes, found)
    if rank == 0:
        print(
            f"both ways {size_bytes} bytes: {size_bytes / statistics.median(times_s) / 1e6:.0f} MB/s each", flush=True
        )
try:
    dist.all_reduce(torch.ones(4).to(device))
except dist.DistBackendError as error:
    print(f"rank {rank} of {dist.get_world_size()}: {str(error).splitlines()[-1]}", flush=True)
os._exit(0)  # an end that waits for the communicator's operations would wait for a GPU
