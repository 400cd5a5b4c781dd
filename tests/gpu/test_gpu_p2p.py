"""Sends and receives of a GPU's memory by the copy engine and TCP, on a fake CUDA driver that notices misuse."""

from __future__ import annotations

import signal
import subprocess
import sys

import fake_gpu
import pytest
from paths import WORKERS
from ports import free_port

pytestmark = pytest.mark.skipif(
    fake_gpu.find("fake_cuda") is None,
    reason="needs the fake CUDA driver: configure the build with -DHOLMES_TESTS=ON (`make test-cpp` does)",
)

CASES = ["sizes", "streams", "in_flight", "arguments", "deadline", "abort", "copy_fails", "no_pinned_memory"]


def environment(copy_us: int) -> dict[str, str]:
    return {
        **fake_gpu.environment(fake_gpu.VERSIONS[-1]),
        "HOLMES_PINNED_RING_BYTES": str(256 * 1024),
        "FAKE_CUDA_COPY_US": str(copy_us),
    }


def run_case(case: str, copy_us: int) -> None:
    command = [sys.executable, str(WORKERS / "gpu_p2p_worker.py"), case]
    process = subprocess.run(
        command, env=environment(copy_us), capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize("case", CASES)
def test_on_a_fast_gpu(case: str) -> None:
    run_case(case, 0)


@pytest.mark.parametrize("case", ["streams", "in_flight", "abort"])
def test_where_copies_are_slower_than_the_network(case: str) -> None:
    run_case(case, 300)


MISUSE = {
    "memory of a GPU was freed": "copy(); cuda.cuMemFree_v2(device)",
    "page-locked memory was freed": "copy(); cuda.cuMemFreeHost(host)",
    "written while a copy of it was queued": "copy(); ctypes.memset(host, 1, 8)",
    "beyond the GPU's allocated memory": "cuda.cuMemcpyHtoDAsync_v2(device, host, c_size_t(4097), None)",
    "no event orders a copy to behind a copy to of the same memory": "device_copy(None); device_copy(other)",
    "in a function of cuLaunchHostFunc": "cuda.cuLaunchHostFunc(None, call_driver, None)",
}


@pytest.mark.parametrize("text", MISUSE)
def test_fake_driver_ends_what_the_real_one_would_do_wrong(text: str) -> None:
    """So that the tests above can fail."""
    program = f"""
import ctypes, os, time
from ctypes import c_size_t, c_ulonglong, c_void_p
cuda = ctypes.CDLL(os.environ["HOLMES_CUDA_LIBRARY"])
device, host = c_ulonglong(), c_void_p()
cuda.cuCtxSetCurrent(c_void_p(1))
assert cuda.cuMemAlloc_v2(ctypes.byref(device), c_size_t(4096)) == 0
assert cuda.cuMemHostAlloc(ctypes.byref(host), c_size_t(8192), 0) == 0
call_driver = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: cuda.cuStreamQuery(None))
other = c_void_p()
cuda.cuStreamCreate(ctypes.byref(other), 1)
source = c_ulonglong()
cuda.cuMemAlloc_v2(ctypes.byref(source), c_size_t(4096))
def device_copy(stream): assert cuda.cuMemcpyAsync(device, source, c_size_t(4096), stream) == 0
def copy(): assert cuda.cuMemcpyHtoDAsync_v2(device, host, c_size_t(4096), None) == 0
{MISUSE[text]}
time.sleep(5)
"""
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, env=environment(100_000), capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == -signal.SIGABRT, process.stderr
    assert text in process.stderr


def test_killed_peer_is_named_while_copies_are_under_way() -> None:
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKERS / "gpu_p2p_rank.py"), str(rank), str(port)],
            env=environment(2000),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=90)[0] for process in ranks]
    assert ranks[1].returncode == -signal.SIGKILL, outputs
    assert ranks[0].returncode == 0, outputs[0]
    assert "PeerLostError" in outputs[0], outputs
    assert "rank 1" in outputs[0], outputs
