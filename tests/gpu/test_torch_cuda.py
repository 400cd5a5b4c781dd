"""torch's CUDA build, and its ProcessGroupNCCL beside "holmes", on a fake CUDA runtime (tests/fake_cuda_torch)."""

from __future__ import annotations

import time

import pytest
import torch

IS_FAKE = torch.cuda.is_available() and torch.cuda.get_device_name(0).startswith("Fake GPU")
if not IS_FAKE:
    pytest.skip("needs torch's CUDA build on the fake CUDA runtime: run `make test-cuda-fake`", allow_module_level=True)

import torch_cuda_ranks as bodies  # noqa: E402
from gpu_beside_nccl import SLACK_CALLS, Fakes  # noqa: E402
from torch_ranks import run_ranks  # noqa: E402


def test_copies_run_when_their_stream_gets_there():
    source = torch.arange(1000.0).pin_memory()
    target, back = torch.zeros(1000, device="cuda"), torch.zeros(1000).pin_memory()
    torch.cuda.synchronize()
    Fakes().hold(0.2)
    begin = time.monotonic()
    target.copy_(source, non_blocking=True)
    back.copy_(target, non_blocking=True)
    assert time.monotonic() - begin < 0.1
    assert not torch.equal(back, source)
    torch.cuda.synchronize()
    assert torch.equal(back, source)


def test_streams_wait_for_events_and_events_take_time():
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    data = torch.zeros(10, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        begin.record()
        Fakes().hold(0.1)
        data.fill_(3.0)
        end.record()
    second.wait_event(end)
    with torch.cuda.stream(second):
        copied = data.clone()
    assert not end.query()
    second.synchronize()
    assert set(copied.tolist()) == {3.0}
    assert 90 <= begin.elapsed_time(end) < 1000


def test_freed_memory_is_its_streams_again():
    data = torch.empty(1 << 20, device="cuda")
    address = data.data_ptr()
    side = torch.cuda.Stream()
    data.record_stream(side)
    with torch.cuda.stream(side):
        Fakes().hold(0.2)
    del data
    other = torch.empty(1 << 20, device="cuda")
    assert other.data_ptr() != address  # the side stream still has it
    side.synchronize()
    third = torch.empty(1 << 20, device="cuda")
    assert third.data_ptr() == address


def test_an_unknown_kernel_is_refused():
    data = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="NO_BINARY_FOR_GPU"):
        data / data


BODIES = [bodies.values, bodies.lists, bodies.ddp, bodies.fsdp2, bodies.graphs]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_both_backends(body):
    run_ranks(body, 2)


@pytest.mark.timeout(450)  # it waits for watchdogs to come to rest
def test_no_more_calls_and_memory_than_process_group_nccl():
    for found in run_ranks(bodies.costs, 2, timeout_s=400.0):
        assert found
        for name, row in found.items():
            theirs, ours = (row[backend] for backend in bodies.BACKENDS)
            for what, count in ours.items():
                assert count <= theirs[what] + SLACK_CALLS, f"{name}: {count} {what}, ProcessGroupNCCL {theirs[what]}"
