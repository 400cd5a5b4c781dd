"""benchmarks/gpu_check.sh: its steps' limits, and those of its scripts that met the real NCCL's rules by mistake.

All steps, one after the other: `benchmarks/gpu_check.sh --dry-run`, which takes minutes.
"""

from __future__ import annotations

import re
import subprocess
import sys

import fake_gpu
import gpu_kernels
import pytest
import torch
from paths import BENCHMARKS

SCRIPT = (BENCHMARKS / "gpu_check.sh").read_text()
MOST_S = 480  # eight of the ten minutes for which a machine is lent
ALIGNMENT_BYTES = 16

needs_fakes = pytest.mark.skipif(
    fake_gpu.find("fake_cuda") is None,
    reason="needs the fake NCCL: configure the build with -DHOLMES_TESTS=ON (`make test-cpp` does)",
)


def test_every_step_has_a_limit_below_eight_minutes():
    limits = re.findall(r"(?<![\w$])step (\S+) \"", SCRIPT)
    assert len(limits) > 10
    assert {int(limit) for limit in limits} <= set(range(1, MOST_S + 1)), limits


def test_no_step_fetches_anything():
    commands = "\n".join(line for line in SCRIPT.splitlines() if not line.lstrip().startswith("#"))
    assert re.findall(r"\b(pip|make|curl|wget|apt|apt-get|conda|uv|git (?:clone|fetch|pull))\b", commands) == []


@needs_fakes
@pytest.mark.parametrize(
    "arguments",
    [
        "gpu_ranks.py --ranks 4 --dry-run check",
        "gpu_ranks.py --dry-run graph",
        "gpu_ranks.py --dry-run images",
        "gpu_ranks.py --ranks 3 --dry-run killed",
        "gpu_plugin.py --dry-run",
        "gpu_overhead.py --rounds 1 --dry-run",  # raw NCCL beside ours, where two ranks have one GPU
    ],
)
def test_the_scripts_of_several_ranks_on_one_gpu(arguments):
    script, *rest = arguments.split()
    command = [sys.executable, str(BENCHMARKS / script), *rest]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_kernels_are_timed_on_aligned_tensors():
    """On others they never take the path of 128-bit accesses."""
    for dtype in (torch.bfloat16, torch.float32):
        bucket = torch.zeros(gpu_kernels.DRY_BYTES // 2, dtype=dtype)
        tensors = gpu_kernels.split(bucket, dtype, 0)
        offset = 0
        for tensor in tensors:
            assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
            assert offset * dtype.itemsize % ALIGNMENT_BYTES == 0
            offset += tensor.numel()
        assert offset == bucket.numel()
        assert len(tensors) > gpu_kernels.TENSORS // 2


def test_the_hosts_own_time_is_not_taken_for_the_kernels(monkeypatch):
    """A table of 300 tensors takes Python longer than the kernel the device: it is kept busy until all are queued."""
    happened = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            happened.append("event")

        def synchronize(self):
            happened.append("wait")

        def elapsed_time(self, end):
            return 6.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: happened.append("sleep"))
    seconds = gpu_kernels.Timer("cuda", repeats=3)(lambda: happened.append("kernel"))
    assert happened == ["sleep", "event", "kernel", "kernel", "kernel", "event", "wait"]
    assert seconds == pytest.approx(0.002)
