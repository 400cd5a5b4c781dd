"""Schedules of training over several NCCL libraries on devices with few multiprocessors: no deadlock, and overlap."""

from __future__ import annotations

import sys

import fake_gpu
import pytest
from device_trace import run_watched
from paths import WORKERS

pytestmark = [
    pytest.mark.alone,  # measures what overlaps
    pytest.mark.skipif(
        fake_gpu.find("fake_cuda") is None,
        reason="needs the fake NCCL: configure the build with -DHOLMES_TESTS=ON (`make test-cpp` does)",
    ),
]

WORKER = WORKERS / "schedule_worker.py"


def run(folder, case, *, multiprocessors, serialised=False):
    command = [sys.executable, str(WORKER), case, *(["serialised"] if serialised else [])]
    environment = fake_gpu.environment(fake_gpu.VERSIONS[-1]) | {"FAKE_CUDA_MULTIPROCESSORS": str(multiprocessors)}
    return run_watched(command, environment, folder)


def check_overlaps(folder, case, shares, *, multiprocessors):
    """That each pair overlaps for more than its share of the shorter one's time, in one of three runs: whatever else
    this machine does can only keep them apart."""
    for attempt in range(3):
        (folder / str(attempt)).mkdir()
        trace, deadlock = run(folder / str(attempt), case, multiprocessors=multiprocessors)
        assert not deadlock
        overlaps = trace.overlaps()
        short = {
            pair: overlaps[pair] for pair, share in shares.items() if overlaps[pair][0] <= share * overlaps[pair][1]
        }
        if not short:
            return
    raise AssertionError(f"overlap and the shorter one's time, of pairs that are under {shares}: {short}")


@pytest.mark.parametrize("multiprocessors", [48, 132])
def test_a_ring_of_receives_and_sends_over_three_libraries(tmp_path, multiprocessors):
    trace, deadlock = run(tmp_path, "ring", multiprocessors=multiprocessors)
    assert not deadlock
    assert len(trace.kernels()) == 3 * 10 * 2
    assert {kernel.name for kernel in trace.kernels()} == {"one", "two", "three"}
    assert min(both for both, _ in trace.overlaps().values()) > 0


@pytest.mark.parametrize("multiprocessors", [48, 132])
def test_megatrons_interleaved_schedule(tmp_path, multiprocessors):
    # Messages move while stages compute.
    check_overlaps(tmp_path, "interleaved", {("compute", "pipeline"): 0.5}, multiprocessors=multiprocessors)


def test_sharded_data_parallel_with_tensor_parallel(tmp_path):
    shares = {("compute", "shard"): 0.3, ("compute", "replica"): 0.3, ("replica", "tensor"): 0.1}
    check_overlaps(tmp_path, "sharded", shares, multiprocessors=132)


@pytest.mark.parametrize("case", ["ring", "interleaved"])
def test_the_device_finds_the_deadlock_of_operations_that_wait_for_other_libraries(tmp_path, case):
    _, deadlock = run(tmp_path, case, multiprocessors=132, serialised=True)
    print(deadlock)
    assert "deadlock of the devices" in deadlock
    assert "ncclRecv" in deadlock
    assert "behind an event" in deadlock or "multiprocessors, of which" in deadlock
