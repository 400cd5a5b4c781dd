"""transport="auto" from `init` on: hosts with RDMA ports, on the stand-in for libibverbs, as ranks in one network
namespace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import BUILD
from namespaces import child_env, needs_namespaces
from paths import WORKERS

from holmes.lab.fake_sysfs import write_sysfs

WORKER = WORKERS / "auto_transport_worker.py"
VERBS = next(
    (path for path in BUILD.glob("*/tests/cpp/fake_verbs/libfake_verbs.so") if "sanitize" not in str(path)), None
)

pytestmark = [
    needs_namespaces,
    pytest.mark.skipif(VERBS is None, reason="no stand-in for libibverbs; `make test-cpp` builds it"),
]


def port(number: int, **fields: Any) -> dict[str, Any]:
    """Interface e<number> with 10.0.0.<number + 1>, the port of HCA fake<number>."""
    address = f"10.0.0.{number + 1}/24"
    hca = {"nic_class": "roce_v2", "hca": f"fake{number}"}
    return {"name": f"e{number}", "speed_gbps": 100, "addresses": [address], **hca, **fields}


def run(
    folder: Path, interfaces: list[dict[str, Any]], processes: list[tuple[list[int], dict[str, str]]], **variables: str
) -> tuple[dict[int, dict[str, Any]], str]:
    """Rank i is on a host with interface number i. `processes`: ranks that are its threads, and its variables.

    Returns what the ranks say, and what they write to standard error.
    """
    for rank, interface in enumerate(interfaces):
        write_sysfs(folder / str(rank), {"interfaces": [interface]})
    write_sysfs(folder / "all", {"interfaces": interfaces})
    common = {
        **child_env(),
        "HOLMES_SHM": "0",
        "HOLMES_LOG": "info",
        "HOLMES_VERBS_LIBRARY": str(VERBS),
        "HOLMES_RDMA_GID_INDEX": "1",
        "HOLMES_SYSFS_ROOT": str(folder / "all"),
        "HOLMES_SECRET": "the secret of the tests",
        **variables,
    }
    made = ["ip link set lo up"]
    for number in range(0, len(interfaces) + 1, 2):
        made.append(f"ip link add e{number} type veth peer name e{number + 1}")
        made += [f"ip link set e{end} up" for end in (number, number + 1)]
    made += [f"ip addr add 10.0.0.{number + 1}/24 dev e{number}" for number in range(len(interfaces))]
    for number, (ranks, own) in enumerate(processes):
        words = " ".join(f"{name}='{value}'" for name, value in own.items())
        named = " ".join(map(str, ranks))
        command = f"env {words} {sys.executable} {WORKER} 29400 {len(interfaces)} {folder} {named}"
        made.append(f"{command} >{folder}/out{number} & p{number}=$!")
    made += [f"wait $p{number} || exit 1" for number in range(len(processes))]
    done = subprocess.run(
        ["unshare", "-Urn", "sh", "-c", "\n".join(made)],
        env=common,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [one for number in range(len(processes)) for one in json.loads((folder / f"out{number}").read_text())]
    return {one["rank"]: one for one in said}, done.stderr


def transports(said: dict[int, dict[str, Any]]) -> set[str]:
    assert all("peers" in one for one in said.values()), said
    return {transport for one in said.values() for found in one["peers"].values() for transport in found}


def test_auto_takes_rdma_where_all_hosts_have_ports_of_one_fabric(tmp_path: Path) -> None:
    said, told = run(tmp_path, [port(0), port(1)], [([0, 1], {})])
    assert transports(said) == {"rdma"}, told
    for rank in range(2):
        assert f"on e{rank} 10.0.0.{rank + 1}, RDMA over fake{rank}:1: roce 10.0.0.0/24" in told
    assert told.count("; RDMA over roce 10.0.0.0/24 at 100 Gbit/s\n") == 2, told
    assert "not RDMA" not in told


@pytest.mark.parametrize("variable", ["HOLMES_TRANSPORT", "ASKED"])
def test_transport_tcp_switches_it_off(tmp_path: Path, variable: str) -> None:
    said, told = run(tmp_path, [port(0), port(1)], [([0, 1], {})], **{variable: "tcp"})
    assert transports(said) == {"tcp"}
    assert "RDMA" not in told


def test_one_rank_of_three_without_a_port_keeps_all_on_tcp(tmp_path: Path) -> None:
    bare = port(1, nic_class="ethernet", hca="")
    said, told = run(tmp_path, [port(0), bare, port(2)], [([0, 1, 2], {})])
    assert transports(said) == {"tcp"}
    assert told.count("not RDMA: rank 1 (host") == told.count("has no active RDMA port that it may use") == 3, told


@pytest.mark.parametrize(
    ("own", "variables", "why"),
    [
        ({"HOLMES_VERBS_LIBRARY": "/nowhere/libibverbs.so.1"}, {}, "/nowhere/libibverbs.so.1 cannot be loaded"),
        ({"HOLMES_TRANSPORT": "tcp"}, {"NICS": "class:roce"}, "has HOLMES_TRANSPORT=tcp"),
    ],
)
def test_one_rank_that_cannot_or_will_not_keeps_all_on_tcp(
    tmp_path: Path, own: dict[str, str], variables: dict[str, str], why: str
) -> None:
    said, told = run(tmp_path, [port(0), port(1)], [([0], {}), ([1], own)], **variables)
    assert transports(said) == {"tcp"}
    reasons = [line for line in told.splitlines() if "not RDMA: rank 1 (host" in line and why in line]
    assert len(reasons) == 2, told


def test_a_rank_that_asks_for_tcp_where_others_do_not_is_told(tmp_path: Path) -> None:
    said, _ = run(tmp_path, [port(0), port(1)], [([0], {}), ([1], {"HOLMES_TRANSPORT": "tcp"})])
    assert ["ask for different transports" in one["error"] for one in said.values()] == [True, True]


@pytest.mark.parametrize("asked", ["auto", "rdma"])
def test_inside_a_cluster_it_is_rdma_and_between_clusters_tcp(tmp_path: Path, asked: str) -> None:
    bare = port(2, nic_class="ethernet", hca="")
    said, told = run(tmp_path, [port(0), port(1), bare], [([0, 1, 2], {})], CLUSTERS="a,a,b", ASKED=asked)
    inside, between = ["rdma"], ["tcp"]
    assert [one["peers"] for _, one in sorted(said.items())] == [
        {"1": inside, "2": between},
        {"0": inside, "2": between},
        {"0": between, "1": between},
    ], told
    assert told.count("spans the clusters a, b; between them ethernet 10.0.0.0/24") == 3, told


def test_a_cluster_that_cannot_leaves_rdma_to_the_other(tmp_path: Path) -> None:
    ports = [port(0), port(1), port(2), port(3)]
    why = "/nowhere/libibverbs.so.1 cannot be loaded"
    processes = [([0, 1], {}), ([2], {"HOLMES_VERBS_LIBRARY": "/nowhere/libibverbs.so.1"}), ([3], {})]
    said, told = run(tmp_path, ports, processes, CLUSTERS="a,a,b,b")
    assert (said[0]["peers"]["1"], said[1]["peers"]["0"]) == (["rdma"], ["rdma"]), told
    assert (said[2]["peers"]["3"], said[3]["peers"]["2"]) == (["tcp"], ["tcp"])
    reasons = [line for line in told.splitlines() if "not RDMA: rank 2 (host" in line and why in line]
    assert len(reasons) == 2, told
