"""`cpu:holmes,cuda:holmes` without a GPU: torch's device type "cuda" on the fake CUDA driver, NCCL on the fake one."""

from __future__ import annotations

import os
import signal

import fake_gpu
import pytest
import torch

pytestmark = [
    pytest.mark.skipif(
        fake_gpu.find("fake_cuda") is None or fake_gpu.find_module("fake_torch_cuda") is None,
        reason="needs the fake NCCL and the fake torch device: configure the build with -DHOLMES_TESTS=ON and torch",
    ),
    pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA: the fake takes its place"),
]

import cuda_ranks  # noqa: E402
from torch_ranks import run_ranks  # noqa: E402

VERSIONS = fake_gpu.VERSIONS if fake_gpu.IS_LONG else fake_gpu.VERSIONS[-1:]


@pytest.fixture(params=VERSIONS)
def fakes(request, monkeypatch):
    for name, value in fake_gpu.environment(request.param).items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    return request.param


def test_operations_streams_and_errors(fakes):
    run_ranks(cuda_ranks.everything, 3)


def test_a_wait_that_is_left_out_ends_the_process(fakes, monkeypatch):
    """Where the driver forgets it: so that accesses are in order is looked at in all of the tests here."""
    run_ranks(cuda_ranks.freed, 1)
    monkeypatch.setenv("FAKE_CUDA_DROP", "wait")
    with pytest.raises(AssertionError, match=rf"ranks \[0\] died: \[{-signal.SIGABRT}"):
        run_ranks(cuda_ranks.freed, 1)


def test_ranks_that_come_late_and_eager_connection(fakes):
    run_ranks(cuda_ranks.late, 2)


def test_lost_rank(fakes):
    texts = run_ranks(cuda_ranks.lost_rank, 3, lost=(1,))
    assert all("PeerLostError" in texts[rank] and "rank 1" in texts[rank] for rank in (0, 2)), texts
