"""`holmes topology` on the real testbed: no labels, ranks shuffled, names that differ; wrong classes; slow wires."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from namespaces import needs_namespaces

import holmes
from holmes.cluster.topology import Topology
from holmes.lab.testbed import Testbed, TestbedSession
from holmes.lab.testbed.spec import load_spec

pytestmark = pytest.mark.alone

TOLERANCE = 0.15  # of the rate that the testbed's links are limited to; TCP's payload alone is 5 % below it


def discovered(session: TestbedSession, folder: Path, *options: str, seed: int | None = None) -> tuple[Topology, str]:
    """What `holmes topology` saved, and what it printed."""
    path = folder / "found.yaml"
    command = [sys.executable, "-m", "holmes", "topology", "--save", str(path), *options]
    result = session.launch(command, nproc_per_node=1, shuffle_seed=seed).wait(120)
    assert result.returncode == 0, result.outputs
    return Topology.load(path), "\n".join(result.outputs[0])


@needs_namespaces
def test_clusters_classes_and_rates_without_any_label(tmp_path: Path) -> None:
    spec = load_spec("names-differ")
    with Testbed(spec).session() as session:
        found, printed = discovered(session, tmp_path, "--draw", str(tmp_path / "found.svg"), seed=5)
    assert [host.name for host in found.hosts] != [node.name for node in spec.nodes]  # shuffled
    clusters = {frozenset(cluster.hosts): cluster.nic_class for cluster in found.clusters}
    assert clusters == {
        frozenset(("node-17", "node-03")): "infiniband",
        frozenset(("node-11", "node-08")): "roce_v2",
    }
    assert len(found.fabrics) == 3
    for fabric in found.fabrics:
        limit_gbps = {"infiniband": 1.0, "roce_v2": 1.0, "ethernet": 0.1}[fabric.nic_class]
        assert fabric.confirmed
        assert fabric.measured_gbps == pytest.approx(limit_gbps, rel=TOLERANCE)
        assert fabric.latency_s is not None
        for host_id, nic in fabric.ports.items():
            name = next(host.name for host in found.hosts if host.host_id == host_id)
            assert spec.node(name).nic(nic).nic_class == fabric.nic_class
    (link,) = found.links
    assert link.gbps == pytest.approx(0.1, rel=TOLERANCE)
    assert (link.pairs, link.is_shared) == (2, False)
    assert found.findings == ()
    assert "infiniband 10.10.0.0/16" in printed
    assert holmes.check(holmes.plan_for(found, model_layers=4), found).holds
    assert (tmp_path / "found.svg").stat().st_size > 1000


@needs_namespaces
def test_wrong_classes_are_reported_by_name(tmp_path: Path) -> None:
    with Testbed("wrong-class").session() as session:
        found, printed = discovered(session, tmp_path, "--timeout-s", "1", "--measure-s", "0")
    assert [(finding.host, finding.nic, finding.kind) for finding in found.findings] == [
        ("says-roce", "ib0", "class"),
        ("cut-off", "ib0", "unreachable"),
    ]
    assert found.clusters[0].hosts == ("a0", "a1", "a2")
    assert "host says-roce NIC ib0 (class): says roce_v2" in printed


@needs_namespaces
def test_hosts_behind_slow_uplinks_are_two_clusters(tmp_path: Path) -> None:
    with Testbed("slow-uplink").session() as session:
        for _ in range(3):  # what else runs on a shared machine may hold 1 Gbit/s up, or streams that are to be at once
            found, _ = discovered(session, tmp_path)
            assert [cluster.hosts for cluster in found.clusters] == [("a0", "a1", "a2"), ("b0", "b1", "b2")]
            inside, between = found.shared_fabrics([0, 1])[0], found.shared_fabrics([0, 5])[0]
            (link,) = found.links
            if inside.measured_gbps == pytest.approx(1.0, rel=TOLERANCE) and link.is_shared:
                break
    assert inside.measured_gbps == pytest.approx(1.0, rel=TOLERANCE)
    assert between.measured_gbps == pytest.approx(0.1, rel=TOLERANCE)
    assert (link.pairs, link.is_shared) == (3, True)  # three pairs at once have what one has
    assert not [finding for finding in found.findings if finding.kind == "slow"]


@needs_namespaces
def test_a_slow_nic_is_reported_by_name(tmp_path: Path) -> None:
    with Testbed("one-cluster").session() as session:
        session.set_rate("a2", "ib0", 0.1)  # its sysfs goes on saying 1 Gbit/s
        found, _ = discovered(session, tmp_path)
    assert [(finding.kind, finding.host, finding.nic) for finding in found.findings] == [("slow", "a2", "ib0")]
    assert [cluster.hosts for cluster in found.clusters] == [("a0", "a1", "a2", "a3")]
    fabric = found.fabrics[0]
    assert fabric.measured_min_gbps == pytest.approx(0.1, rel=TOLERANCE)
