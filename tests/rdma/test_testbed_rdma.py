"""The testbed with nodes that are kernels: `holmes topology` and the demo on fast networks without an IP address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import rig
from namespaces import needs_namespaces

from holmes.cluster.topology import Topology
from holmes.lab.testbed import Testbed, TestbedError, TestbedSession

SPEC = "two-clusters-rdma"
TOPOLOGY = [sys.executable, "-m", "holmes", "topology"]

pytestmark = [
    pytest.mark.alone,
    pytest.mark.usefixtures("hosts"),
    needs_namespaces,
    pytest.mark.skipif("HOLMES_TEST_RDMA" not in os.environ, reason="`make test-rdma` runs it"),
]


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLMES_VERBS_ROOT", str(rig.verbs_root()))


def discovered(session: TestbedSession, file: Path, measure_s: float = 0) -> Topology:
    """What `holmes topology` finds."""
    result = session.launch([*TOPOLOGY, "--measure-s", str(measure_s), "--save", str(file)]).wait(150)
    assert result.returncode == 0, result.outputs
    return Topology.load(file)


@pytest.mark.timeout(400)
def test_clusters_without_an_ip_address(tmp_path: Path) -> None:
    """Found by verbs; and where a wire is cut, which its ends are not told, the hosts behind it are none."""
    with Testbed(SPEC).session() as session:
        found = discovered(session, tmp_path / "whole.yaml")
        measured = discovered(session, tmp_path / "measured.yaml", measure_s=2)
        session.change_link("a1.roce0", up=False)
        cut = discovered(session, tmp_path / "cut.yaml")
    clusters = {cluster.hosts: (cluster.nic_class, cluster.fabric) for cluster in found.clusters}
    assert clusters == {
        ("a0", "a1"): ("roce_v2", "roce_v2 GID fe80::/64"),
        ("b0", "b1"): ("roce_v2", "roce_v2 GID fe80::/64 (2)"),
    }
    assert {port.name for host in found.hosts for port in host.ports} == {"eth0", "rxe0:1"}
    assert found.findings == ()
    assert {cluster.hosts for cluster in measured.clusters} == set(clusters)
    for fabric in measured.fabrics:
        if fabric.nic_class == "roce_v2":  # some Gbit/s of user-mode Linux, on a busy machine less
            assert 0.01 < (fabric.measured_gbps or 0) < 50, fabric
            assert 0 < (fabric.latency_s or 0) < 0.5, fabric
    assert [(f.nic_class, len(f.ports)) for f in cut.fabrics] == [("roce_v2", 2), ("ethernet", 4)]
    assert {(finding.kind, finding.host, finding.nic) for finding in cut.findings} == {
        ("unreachable", "a0", "rxe0:1"),
        ("unreachable", "a1", "rxe0:1"),
    }


@pytest.mark.timeout(200)
def test_a_kernel_that_ends_is_named() -> None:
    with Testbed(SPEC).session() as session:
        process = session.spawn("b1", ["sleep", "100"])
        with pytest.raises(TimeoutError):
            process.wait(0.1)
        session.spawn(None, ["sh", "-c", f"kill -9 {session._kernels[3].pid}"])
        with pytest.raises(TestbedError, match="the kernel of node b1 has ended"):
            process.wait(20)


PAIR = """
kernel: uml
networks:
  roce: {class: roce_v2, mtu: 4200}
clusters:
  a:
    nodes: 2
    nics:
      - {name: roce0, network: roce, hca: rxe0}
"""


@pytest.mark.timeout(400)
def test_bench_beside_perftest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the port that ours uses. What is too long for it is left out, and said."""
    if rig.verbs_root() == rig.WORK / "root":  # nobody gave one
        monkeypatch.delenv("HOLMES_VERBS_ROOT")
    try:
        monkeypatch.setenv("HOLMES_VERBS_ROOT", str(rig.perftest_root()))
    except rig.Missing as missing:
        pytest.skip(str(missing))
    spec, result = tmp_path / "pair.yaml", tmp_path / "result.json"
    spec.write_text(PAIR)
    words = "send ping_pong all_gather --transport rdma --peers perftest --sizes 64,64K,9M --seconds 0.4 --rounds 2"
    command = [sys.executable, "-m", "holmes", "bench", *words.split(), "--testbed", str(spec), "--json", str(result)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=380)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    print(ended.stdout)
    document = json.loads(result.read_text())
    assert {"port": "rxe0:1", "gid_index": 1}.items() <= document["peers"]["perftest"].items()
    rows = {(row["operation"], row["peer"], row["size_bytes"]): row for row in document["rows"]}
    both = {
        (operation, peer, size)
        for operation in ("send", "ping_pong")
        for peer in ("holmes", "perftest")
        for size in (64, 65536)
    }
    assert {key for key in rows if key[0] != "all_gather" and key[2] < 9 << 20} == both
    for operation, peer, size in both:
        row = rows[operation, peer, size]
        assert row["time_us"] > 0
        assert row["wrong_elements"] == (0 if peer == "holmes" else None)
        if peer == "holmes":
            assert row["ratios"]["perftest"] > 0
        if operation == "ping_pong":
            assert 0 < row["p50_us"] <= row["p99_us"]
    assert {peer for operation, peer, size in rows if operation == "all_gather" or size == 9 << 20} == {"holmes"}
    assert "# perftest: skipped, it has send (ib_write_bw) and ping_pong (ib_write_lat) only" in ended.stdout
    assert ended.stdout.count("# perftest: 9437184 B skipped, a message has 8388608 B at most there") == 2


@pytest.mark.timeout(900)
def test_the_demo_over_verbs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holmes", "demo", "--testbed", SPEC, "--steps", "3", "--out", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=880)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    rows = {(row["run"], row["group"], row["nic"]): row for row in result["traffic"]}
    assert (
        rows["holmes", "data parallel", "rxe0:1"]["bytes_per_step"]
        > 10 * rows["holmes", "pipeline", "eth0"]["bytes_per_step"]
    )
    assert rows["holmes", "all", "rxe0:1"]["packets_per_step"] > 0
    assert "Soft-RoCE" in result["emulated"]
