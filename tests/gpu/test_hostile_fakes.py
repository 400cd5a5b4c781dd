"""The fakes of CUDA and NCCL (tests/fake_nccl) refuse, wait and break as the real ones, so that tests can fail."""

from __future__ import annotations

import signal
import subprocess
import sys

import fake_gpu
import pytest
from paths import WORKERS

pytestmark = pytest.mark.skipif(
    fake_gpu.find("fake_cuda") is None,
    reason="needs the fake NCCL: configure the build with -DHOLMES_TESTS=ON (`make test-cpp` does)",
)

ENDS = {
    "bounds": "an operation's output reaches beyond the GPU's allocated memory",
    "order": "no event orders a fill behind a fill of the same memory",
    "order_in_graph": "no event orders a fill behind a fill of the same memory",
}


def run_case(case: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(WORKERS / "hostile_fakes_worker.py"), case]
    environment = fake_gpu.environment(fake_gpu.VERSIONS[-1])
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("case", ["progress", "sticky", "duplicate", "capture", "graph"])
def test_what_the_real_ones_do(case: str) -> None:
    run = run_case(case)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("case", ENDS)
def test_what_the_real_ones_would_do_silently_wrong_ends_the_process(case: str) -> None:
    run = run_case(case)
    assert run.returncode == -signal.SIGABRT, run.stdout + run.stderr
    assert ENDS[case] in run.stderr
