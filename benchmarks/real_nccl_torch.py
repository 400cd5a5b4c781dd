"""A program that knows nothing of Holmes, on NCCL's own host half: torchrun starts it for `real_nccl.sh`.

PyTorch's ProcessGroupNCCL makes its communicator over the network plugin that the environment names. No kernel runs, so
the operation is refused; by then NCCL has connected. NCCL's log tells which NICs.
"""

import os

import torch
import torch.distributed as dist

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
try:
    dist.all_reduce(torch.ones(4, device=device))
except dist.DistBackendError as error:
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {str(error).splitlines()[-1]}", flush=True)
os._exit(0)  # an end that waits for the communicator's operations would wait for a GPU
