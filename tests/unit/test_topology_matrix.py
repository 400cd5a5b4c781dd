"""`holmes topology --matrix`: rates of pairs, what stands in for those that were not measured, and bad pairs."""

from __future__ import annotations

import io
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from topologies import topology_of

from holmes.cluster.topology import Pair, Topology, make_topology
from holmes.cluster.topology.matrix import matrix_of, print_matrix
from holmes_comm import UsageError


def measured(topology: Topology, gbps: float, **slow: float) -> Topology:
    """Every pair of the InfiniBand hosts at this rate, but "a_b": another one; its fabric has the median."""
    hosts = [host.name for host in topology.hosts if host.ports[0].nic_class == "infiniband"]
    pairs = [
        Pair((a, b), ("nic0_0", "nic0_0"), slow.get(f"{a}_{b}", gbps), 1e-5)
        for a, b in itertools.combinations(hosts, 2)
    ]
    fabrics = [
        replace(f, measured_gbps=gbps if f.nic_class == "infiniband" else None, confirmed=True)
        for f in topology.fabrics
    ]
    return make_topology(topology.hosts, fabrics, pairs=pairs)


def printed(topology: Topology, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_matrix(console, matrix_of(topology))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


SMALL = topology_of([[1, 1, 1], [1, 1]])


def test_rates_and_the_bad_pair() -> None:
    found = measured(SMALL, 190.0, c0h0_c0h2=60.0)
    ours = matrix_of(found)
    assert ours.names == ("c0h0", "c0h1", "c0h2", "c1h0", "c1h1")
    texts = [[cell.text if cell else "." for cell in row] for row in ours.cells]
    assert texts[0] == [".", "190", "60!", "(25)", "(25)"]
    assert texts == [list(column) for column in zip(*texts, strict=True)]
    (bad,) = ours.bad
    assert bad.hosts == ("c0h0", "c0h2")
    assert "60 Gbit/s, 0.32 of the others' 190 on infiniband" in bad.why
    one_of_two = measured(topology_of([[1, 1, 1], [1, 1]]), 120.0, c0h0_c0h2=50.0, c0h0_c0h1=190.0)
    assert [bad.why.split("of ")[1] for bad in matrix_of(one_of_two).bad] == [
        "the others' 155 on infiniband 10.0.0.0/16"
    ]
    lines = printed(found)
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["c0h0", "c0h1", "c0h2", "c1h0", "c1h1"]
    assert "! c0h0 - c0h2" in lines[-1]


def test_hosts_that_should_reach_each_other_and_do_not() -> None:
    """One host's InfiniBand port is up, but in no fabric that was confirmed."""
    fabrics = [
        replace(
            f, confirmed=True, ports={h: p for h, p in f.ports.items() if (f.nic_class, h) != ("infiniband", "id2")}
        )
        for f in SMALL.fabrics
    ]
    found = matrix_of(make_topology(SMALL.hosts, fabrics))
    assert {one.hosts for one in found.bad} == {("c0h0", "c0h2"), ("c0h1", "c0h2")}
    assert found.bad[0].why.startswith("out of each other's reach on infiniband")
    assert found.cells[0][2] is not None
    assert found.cells[0][2].text == "(25)!"


def test_many_hosts_are_shown_by_cluster_and_many_columns_go_on_below() -> None:
    many = matrix_of(topology_of([[1] * 20, [1] * 20]))
    assert (many.kind, many.names) == ("clusters", ("cluster 0", "cluster 1"))
    assert [cell.text if cell else "." for cell in many.cells[0]] == ["(200)", "(25)"]
    lines = printed(topology_of([[1] * 12, [1] * 12]))
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("c1h11 ") for line in lines) == 2
    assert "no pair was measured" in lines[-1]


def test_pairs_are_kept_in_the_file(tmp_path: Path) -> None:
    found = measured(SMALL, 190.0)
    found.save(tmp_path / "t.yaml")
    assert Topology.load(tmp_path / "t.yaml") == found
    data = found.to_dict()
    data["pairs"][0]["nics"] = ["nic0_0", "ib7"]
    with pytest.raises(UsageError, match=r"pairs\[0\] names NIC 'ib7', but host c0h1 has no such NIC; it has nic0_0"):
        Topology.from_dict(data)
    data["pairs"][0] = {"hosts": ["c0h0", "c0h9"], "nics": ["nic0_0", "nic0_0"], "gbps": 1.0, "latency_s": 1e-5}
    with pytest.raises(UsageError, match=r"pairs\[0\] names host 'c0h9', which is not in hosts"):
        Topology.from_dict(data)
