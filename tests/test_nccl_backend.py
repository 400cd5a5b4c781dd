"""The NCCL backend on a fake NCCL without a GPU (tests/fake_nccl): operations, streams, failures, several versions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fake_gpu
import pytest

pytestmark = pytest.mark.skipif(
    fake_gpu.find("fake_cuda") is None,
    reason="needs the fake NCCL: configure the build with -DHOLMES_TESTS=ON (`make test-cpp` does)",
)

WORKER = Path(__file__).parent / "nccl_worker.py"
FAULTS = ["init_fail", "init_hang", "stream_hang", "async_error", "call_hang", "abort", "rebuild"]


def run_case(case: str, version: int) -> None:
    command = [sys.executable, str(WORKER), case]
    process = subprocess.run(
        command, env=fake_gpu.environment(version), capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize("version", fake_gpu.VERSIONS)
@pytest.mark.parametrize("case", ["collectives", "arguments"])
def test_every_version(case: str, version: int) -> None:
    run_case(case, version)


@pytest.mark.parametrize("version", [fake_gpu.VERSIONS[0], fake_gpu.VERSIONS[-1]])
@pytest.mark.parametrize("case", ["streams", "images", *FAULTS])
def test_oldest_and_newest(case: str, version: int) -> None:
    run_case(case, version)
