"""Ranks with another NCCL, link layer or transport are refused on every rank, by rank and host, before NCCL runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fake_gpu
import pytest
from paths import WORKERS

import holmes_comm
from holmes.lab.fake_sysfs import write_sysfs

pytestmark = pytest.mark.skipif(
    fake_gpu.find("fake_cuda") is None,
    reason="needs the fake NCCL: configure the build with -DHOLMES_TESTS=ON (`make test-cpp` does)",
)


def errors_of(ranks: list[dict[str, str]]) -> list[str]:
    """What each rank prints; its variables are added to the environment of the fakes."""
    server = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
    worker = str(WORKERS / "nccl_disagreement_rank.py")
    processes = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), str(len(ranks)), str(server.port)],
            env={**fake_gpu.environment(int(own.pop("NCCL_OF", fake_gpu.VERSIONS[-1]))), "NET": "Socket", **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate(ranks)
    ]
    outputs = [process.communicate(timeout=90) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    return [out.strip() for out, _ in outputs]


def test_versions() -> None:
    hosts = ["alpha", "beta", "gamma"]
    versions = ["21803", "23203", "21803"]
    ranks = [{"NCCL_OF": v, "HOLMES_HOSTNAME": h} for v, h in zip(versions, hosts, strict=True)]
    for error in errors_of(ranks):
        assert error.startswith("UsageError: the ranks run different versions of NCCL"), error
        assert "NCCL 2.18.3: rank 0 (host alpha), rank 2 (host gamma); NCCL 2.32.3: rank 1 (host beta)" in error


def port_of(folder: Path, nic_class: str) -> dict[str, str]:
    """A machine with one RDMA port of this class."""
    port = {"name": "ib0", "nic_class": nic_class, "hca": "mlx5_ib0", "addresses": ["10.5.0.1/24"], "speed_gbps": 100}
    root = str(write_sysfs(folder, {"interfaces": [port]}))
    return {"NET": "IB", "HCA": "mlx5_ib0:1", "INTERFACE": "ib0", "SYSFS": root}


def test_link_layers(tmp_path: Path) -> None:
    ranks = [
        port_of(tmp_path / "0", "infiniband") | {"HOLMES_HOSTNAME": "alpha"},
        port_of(tmp_path / "1", "roce") | {"HOLMES_HOSTNAME": "beta"},
    ]
    for error in errors_of(ranks):
        assert error.startswith("NicError: the ranks' NICs cannot talk to each other"), error
        assert "InfiniBand HCAs: rank 0 (host alpha); Ethernet HCAs: rank 1 (host beta)" in error


def test_transports(tmp_path: Path) -> None:
    ranks = [port_of(tmp_path, "roce") | {"HOLMES_HOSTNAME": "alpha"}, {"HOLMES_HOSTNAME": "beta"}]
    for error in errors_of(ranks):
        assert "Ethernet HCAs: rank 0 (host alpha); sockets: rank 1 (host beta)" in error, error


def test_one_rank_without_the_port(tmp_path: Path) -> None:
    ranks = [
        port_of(tmp_path / "0", "roce") | {"HOLMES_HOSTNAME": "alpha"},
        port_of(tmp_path / "1", "roce") | {"HOLMES_HOSTNAME": "beta", "HCA": "mlx5_9:1"},
    ]
    for error in errors_of(ranks):
        assert error.startswith("NicError: rank 1 on host beta: there is no HCA port 'mlx5_9:1'"), error
