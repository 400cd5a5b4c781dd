"""What nvcc made of the kernels: 16 bytes at a time, no spills. Read from the built library; no GPU needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

import holmes_comm

_LIBRARY = Path(holmes_comm.__file__).parent / "lib/libholmes_cuda.so"
#: Four blocks of 256 threads in a multiprocessor of 65,536 registers.
_MOST_REGISTERS = 64
#: Of single elements, before and after the vectors: four at a time, as nvcc unrolls them.
_MOST_SINGLE_STORES = 8


def _cuobjdump(option: str) -> str:
    wheels = [str(path) for path in Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin")]
    path = os.pathsep.join([os.environ["PATH"], *wheels])
    program = shutil.which("cuobjdump", path=path)
    if program is None:
        pytest.skip("needs cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    if not _LIBRARY.exists():
        pytest.skip("needs the CUDA kernels, which are built where nvcc is")
    run = subprocess.run([program, option, _LIBRARY], capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def _instructions() -> dict[str, Counter[str]]:
    """By architecture and kernel: how often each instruction stands in it."""
    kernels: dict[str, Counter[str]] = {}
    architecture, kernel = "", Counter[str]()
    for line in _cuobjdump("-sass").splitlines():
        if found := re.search(r"arch = (\S+)", line):
            architecture = found.group(1)
        elif found := re.search(r"Function : (\S+)", line):
            kernel = kernels[f"{architecture} {found.group(1)}"] = Counter()
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", line):
            kernel[found.group(1)] += 1
    return kernels


def _count(kernel: Counter[str], operation: str, wide: bool) -> int:
    return sum(n for name, n in kernel.items() if name.split(".")[0] == operation and (".128" in name) == wide)


def test_kernels_read_and_write_16_bytes_at_a_time() -> None:
    kernels = _instructions()
    assert {re.search(r"(move|sum|square|finish)_kernel", name)[1] for name in kernels} == {
        "move",
        "sum",
        "square",
        "finish",
    }
    for name, kernel in kernels.items():
        assert _count(kernel, "LDL", wide=False) + _count(kernel, "STL", wide=False) == 0, name
        if "finish_kernel" in name:  # of one block's numbers
            continue
        assert _count(kernel, "LDG", wide=True) >= 4, name
        if "square_kernel" in name:  # writes a number for each block
            continue
        assert _count(kernel, "STG", wide=True) >= 1, name
        assert _count(kernel, "STG", wide=False) <= _MOST_SINGLE_STORES, name


def test_kernels_leave_registers_for_four_blocks() -> None:
    found = re.findall(r"REG:(\d+) STACK:(\d+)", _cuobjdump("-res-usage"))
    assert found
    assert max(int(registers) for registers, _ in found) <= _MOST_REGISTERS
    assert {stack for _, stack in found} == {"0"}
