"""Arrays and streams for the scripts of gpu_check.sh: of torch on a GPU, or of the fake driver of tests/fake_nccl."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).parent.parent / "tests" / "helpers"
sys.path.insert(0, str(TESTS))


class Block(NamedTuple):
    """Memory on the GPU: `array` is what a communicator takes, `address` what NCCL takes."""

    array: Any
    address: int
    count: int


class TorchMemory:
    """float32 arrays of torch, on its current stream."""

    def __init__(self, device: int) -> None:
        import torch

        torch.cuda.set_device(device)
        self.torch = torch
        self.device = device

    def make(self, count: int, value: float) -> Block:
        tensor = self.torch.full((count,), value, device=f"cuda:{self.device}")
        return Block(tensor, tensor.data_ptr(), count)

    def values(self, block: Block) -> set[float]:
        return set(block.array.unique().tolist())

    @property
    def stream(self) -> int:
        return int(self.torch.cuda.current_stream().cuda_stream)

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()


class FakeMemory:
    """float32 arrays of the fake driver, on a stream of their own."""

    def __init__(self, device: int) -> None:
        import fake_gpu

        self.fake = fake_gpu
        self.device = device
        self.stream = fake_gpu.make_stream()

    def make(self, count: int, value: float) -> Block:
        import numpy as np

        array = self.fake.Array(np.full(count, value, "float32"), self.device, self.stream)
        return Block(array, array.address, count)

    def values(self, block: Block) -> set[float]:
        self.synchronize()
        return set(block.array.values.tolist())

    def synchronize(self) -> None:
        self.fake.synchronize(self.stream)


def use_fakes(version: int = 23203) -> None:
    """From here on this process and its children work on the fakes. Raises SystemExit where they were not built."""
    import fake_gpu

    if fake_gpu.find("fake_cuda") is None:
        raise SystemExit(
            "the dry run needs the fake NCCL: configure the build with -DHOLMES_TESTS=ON (`make test-cpp`)"
        )
    os.environ.update({key: value for key, value in fake_gpu.environment(version).items() if key.startswith("HOLMES_")})


def memory(device: int) -> TorchMemory | FakeMemory:
    return FakeMemory(device) if "fake_cuda" in os.environ.get("HOLMES_CUDA_LIBRARY", "") else TorchMemory(device)
