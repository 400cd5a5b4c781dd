"""A program that does not know Holmes on its NICs, by NCCL's network plugin: `gpu_plugin.py [--dry-run]`.

Starts itself by torchrun as a program of torch and its backend "nccl" only: two ranks on one GPU, which NCCL takes for
two hosts. With the plugin the sums must be right and NCCL's log must name the NIC and each connection over it; then the
same over NCCL's own sockets, to compare. `--dry-run`: backend "gloo" on the CPU, which has no such log.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

COUNT = 16 << 20  # float32 elements
CALLS = 10
NIC = "lo"


def run_rank(backend: str) -> None:
    """What any trainer does: nothing of Holmes is imported here."""
    import torch
    import torch.distributed as dist

    os.environ["NCCL_HOSTID"] = os.environ["RANK"]  # else NCCL refuses two ranks on one GPU
    dist.init_process_group(backend)
    data = torch.ones(COUNT, device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(data)
    assert data.min().item() == data.max().item() == dist.get_world_size()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        dist.all_reduce(data)
    value = data.max().item()  # waits for the GPU
    seconds = (time.perf_counter() - start) / CALLS
    assert value == float(dist.get_world_size() ** (CALLS + 1)), value
    if dist.get_rank() == 0:
        print(f"all_reduce of {4 * COUNT >> 20} MiB: {1e3 * seconds:.2f} ms, {4 * COUNT / seconds / 1e9:.2f} GB/s")
    dist.destroy_process_group()


def run_job(backend: str, variables: dict[str, str]) -> str:
    """What its two ranks and NCCL wrote; ends this process where one failed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    environment = {**os.environ, "GPU_PLUGIN_BACKEND": backend, "OMP_NUM_THREADS": "1", **variables}
    job = subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240
    )
    if job.returncode != 0:
        sys.exit(f"{variables}: the job ended with {job.returncode}\n{job.stdout[-8000:]}")
    return job.stdout


def rate_of(log: str) -> str:
    return next(line for line in log.splitlines() if line.startswith("all_reduce of "))


def main() -> None:
    if "GPU_PLUGIN_BACKEND" in os.environ:
        run_rank(os.environ["GPU_PLUGIN_BACKEND"])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true")
    backend = "gloo" if parser.parse_args().dry_run else "nccl"
    folder = subprocess.check_output([sys.executable, "-m", "holmes_comm", "--lib-dir"], text=True).strip()
    assert (Path(folder) / "libnccl-net-holmes.so").is_file(), folder
    both = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": NIC, "GLOO_SOCKET_IFNAME": NIC}
    log = run_job(
        backend,
        {
            **both,
            "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
            "NCCL_NET_PLUGIN": "holmes",
            "NCCL_NET": "holmes",
            "HOLMES_NICS": NIC,
            "HOLMES_TRANSPORT": "tcp",
        },
    )
    if backend == "nccl":
        for wanted in (f"NET/holmes : using {NIC} ", "sends to rank 1 (host ", "receives from rank 1 (host "):
            lines = [line for line in log.splitlines() if wanted in line]
            assert lines, f"NCCL's log has no line with '{wanted}'\n{log[-8000:]}"
            print(lines[0])
    print("with the plugin:", rate_of(log))
    print("NCCL's sockets:", rate_of(run_job(backend, {**both, "NCCL_NET_PLUGIN": "none", "NCCL_NET": "Socket"})))


if __name__ == "__main__":
    main()
