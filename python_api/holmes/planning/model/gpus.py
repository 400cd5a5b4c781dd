"""What GPU types can do, for topologies that name only the type. From the vendors' data sheets."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from holmes.cluster.topology import Host
from holmes_comm.errors import UsageError


@dataclass(frozen=True)
class Gpu:
    """Dense 16-bit peak in 1e12 operations per second, memory, and Gbit/s to the other GPUs of its host, each way."""

    tflops: float
    memory_gib: float
    tensor_gbps: float


#: NVLink or Infinity Fabric where the type has it, else PCIe. 16-bit with 32-bit accumulation.
GPUS: Mapping[str, Gpu] = {
    "V100-32GB": Gpu(125, 32, 1200),
    "A100-40GB": Gpu(312, 40, 2400),
    "A100-80GB": Gpu(312, 80, 2400),
    "A800-80GB": Gpu(312, 80, 1600),
    "H100-80GB": Gpu(989, 80, 3600),
    "H800-80GB": Gpu(989, 80, 1600),
    "H20-96GB": Gpu(148, 96, 3600),
    "H200-141GB": Gpu(989, 141, 3600),
    "B200-180GB": Gpu(2250, 180, 7200),
    "L40S-48GB": Gpu(362, 48, 256),
    "MI300X-192GB": Gpu(1307, 192, 3584),
}


def gpu_named(name: str) -> Gpu:
    """The GPU that a driver's name such as "NVIDIA A100-SXM4-80GB" means. Raises ValueError naming the nearest."""
    words = set(name.upper().replace(" ", "-").replace("_", "-").split("-"))
    for known, gpu in GPUS.items():
        if set(known.upper().split("-")) <= words:
            return gpu
    alike = [known for known in GPUS if known.upper().split("-")[0] in words]
    if len(alike) == 1:
        return GPUS[alike[0]]
    near = (alike or difflib.get_close_matches(name.upper(), GPUS, 1, 0.0))[0]
    raise UsageError(
        f"GPU {name!r} is unknown; the nearest is {near!r} (all: {', '.join(GPUS)}); or give gpu_tflops and "
        "gpu_memory_gib of the host in the topology"
    )


def peak_tflops(host: Host) -> float | None:
    """Of one of a host's GPUs; None where the topology does not say it, or names a type that is not known."""
    if host.gpu_tflops is not None or host.gpu is None:
        return host.gpu_tflops
    try:
        return gpu_named(host.gpu).tflops
    except UsageError:
        return None
