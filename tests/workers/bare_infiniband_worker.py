"""A rank of a plain job on a machine whose eight InfiniBand ports have no IP, beside one Ethernet NIC `e0` that is the
emulated node's own: `bare_infiniband_worker.py`, on fakes of CUDA and NCCL. Prints what its groups use, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import torch
import torch.distributed as dist
from cuda_ranks import Gpu

from holmes.lab.fake_sysfs import write_sysfs
from holmes_comm import torch_backend

PORTS = [{"name": "", "nic_class": "infiniband", "hca": f"mlx5_{number}", "speed_gbps": 400} for number in range(8)]
ETHERNET = {"name": "e0", "speed_gbps": 100}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Addresses are the running kernel's: sockets really connect.
        os.environ["HOLMES_SYSFS_ROOT"] = str(
            write_sysfs(folder, {"interfaces": [*PORTS, ETHERNET]}, with_addresses=False)
        )
        dist.init_process_group("holmes")
        rank, size = dist.get_rank(), dist.get_world_size()
        gpu = Gpu(rank)
        data = gpu.full(1000, rank + 1.0)
        dist.all_reduce(data)
        assert set(gpu.result(data)) == {size * (size + 1) / 2}
        on_cpu = torch.full((10,), rank + 1.0)
        dist.all_reduce(on_cpu)
        assert set(on_cpu.tolist()) == {size * (size + 1) / 2}
        interfaces = sorted({row["interface"] for row in torch_backend.connections()})
        print(json.dumps({"nccl": torch_backend.device_descriptions(), "sockets": interfaces}), flush=True)
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
