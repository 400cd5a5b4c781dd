"""The NCCL backend on a fake NCCL without a GPU (tests/fake_nccl): operations, streams, failures, several versions."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fake_gpu
import pytest
from paths import WORKERS
from ports import free_port

pytestmark = pytest.mark.skipif(
    fake_gpu.find("fake_cuda") is None,
    reason="needs the fake NCCL: configure the build with -DHOLMES_TESTS=ON (`make test-cpp` does)",
)

WORKER = WORKERS / "nccl_worker.py"
DEVICE_WORKER = WORKER.with_name("nccl_device_worker.py")
COMPILER = os.environ.get("CXX") or shutil.which("c++")
FAULTS = ["init_fail", "init_hang", "stream_hang", "async_error", "call_hang", "abort", "abort_hang", "rebuild"]


def run_case(case: str, version: int, worker: Path = WORKER, **variables: str) -> None:
    command = [sys.executable, str(worker), case]
    environment = fake_gpu.environment(version) | variables
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize("version", fake_gpu.VERSIONS)
@pytest.mark.parametrize("case", ["collectives", "arguments"])
def test_every_version(case: str, version: int) -> None:
    run_case(case, version)


@pytest.mark.parametrize("version", fake_gpu.VERSIONS)
def test_reductions_of_every_version(version: int) -> None:
    run_case("reductions", version, DEVICE_WORKER)


DEVICE_CASES = [
    *(
        "groups",
        "graphs",
        "graph_lives",
        "capture_undisturbed",
        "registration",
        "side_by_side",
        "small_gpu",
        "refused",
        "exit",
    ),
    *("shrink", "shrink_fails", "settings", "split", "split_share", "split_fails", "calls", "wait_is_freed"),
]
# 2.18 has no registration, 2.27 is the first with shrink.
OLD_CASES = ("registration", "shrink", "settings", "split", "calls")
FEATURES = [(case, 23203) for case in DEVICE_CASES] + [(case, 21803) for case in OLD_CASES]
LONG_FEATURES = [(case, version) for case in DEVICE_CASES for version in (21803, 22707, 23203)]


@pytest.mark.parametrize(("case", "version"), LONG_FEATURES if fake_gpu.IS_LONG else FEATURES)
def test_device_features(case: str, version: int) -> None:
    run_case(case, version, DEVICE_WORKER)


@pytest.mark.parametrize("version", [fake_gpu.VERSIONS[0], fake_gpu.VERSIONS[-1]])
@pytest.mark.parametrize("case", ["streams", "images", "leave", "site_transport", "wide", *FAULTS])
def test_oldest_and_newest(case: str, version: int) -> None:
    run_case(case, version)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for what is preloaded (apt-get install g++)")
def test_no_operation_sleeps(tmp_path: Path) -> None:
    library = tmp_path / "counted_sleeps.so"
    source = WORKERS.parent / "helpers" / "counted_sleeps.cpp"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    run_case("no_sleep", fake_gpu.VERSIONS[-1], DEVICE_WORKER, LD_PRELOAD=str(library))


# Of 8, rank 1 is not connected with 4, 6 and 7 where the group is wide.
@pytest.mark.parametrize(("size", "wide_min_ranks"), [(3, "257"), (8, "5")])
def test_killed_rank_ends_the_others(size: int, wide_min_ranks: str) -> None:
    port = free_port()
    worker = str(WORKER.with_name("nccl_rank.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), str(size), str(port)],
            env=fake_gpu.environment(fake_gpu.VERSIONS[-1]) | {"HOLMES_WIDE_MIN_RANKS": wide_min_ranks},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=90)[0] for process in ranks]
    assert ranks[1].returncode == -signal.SIGKILL, outputs
    for rank in set(range(size)) - {1}:
        assert ranks[rank].returncode == 0, outputs[rank]
        assert "PeerLostError" in outputs[rank], outputs
        assert "rank 1 (host " in outputs[rank], outputs
