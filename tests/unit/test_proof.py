"""The proof: what holds, what does not and what it costs, for plans and for groups of other trainers."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import yaml
from topologies import topology_of, two_clusters
from typer.testing import CliRunner

import holmes
from holmes.cluster.topology import Topology, candidate_fabrics, make_topology
from holmes.planning.groups.rank_grid import RankGrid
from holmes.tools.cli import load


def test_a_plan_that_holds() -> None:
    topology = two_clusters(ranks_per_host=4)
    proof = holmes.check(holmes.plan_for(topology, model_layers=8, tensor=2, expert=2), topology)
    assert proof.holds
    assert proof.fix is None
    proof.require()
    rows = {row.kind: row for row in proof.rows}
    assert (rows["tp"].networks, rows["tp"].groups, rows["tp"].rule) == ("shared memory", 8, "on one host")
    assert rows["dp"].networks == "infiniband 10.1.0.0/24, 200 Gbit/s: 2, roce_v2 10.2.0.0/24, 200 Gbit/s: 2"
    assert [kind for kind, row in rows.items() if row.crossing] == ["mp", "pp", "embd", "tp_ep_pp"]
    assert {row.wrong for row in proof.rows} == {0}


def test_stages_over_clusters_say_what_they_cost() -> None:
    topology = two_clusters(ranks_per_host=4)
    plan = holmes.plan_for(topology, model_layers=8, tensor=2, pipeline=1, span_clusters=True)
    proof = holmes.check(plan, topology)
    assert {violation.kind: violation.groups for violation in proof.violations} == {"dp": 2, "tp_dp": 1}
    assert {violation.slowdown for violation in proof.violations} == {8.0}
    assert proof.fix == (
        "the nearest sizes that fit: tensor=2, pipeline=2 (with the other sizes as they are: pipeline 2, 4, 8)"
    )
    with pytest.raises(ValueError, match=r"leave their networks: 2 dp groups such as \[0, 2, .* 8 times as.* Fix: "):
        proof.require()


def test_a_trainers_groups_in_launch_order() -> None:
    """Megatron numbers ranks as they were launched; here they lie over the hosts at random."""
    topology = topology_of([[4, 4], [4, 4]], random.Random(5))
    grid = RankGrid(range(16), tensor=4, data=2, pipeline=2)
    made = {kind: grid.groups(kind).tolist() for kind in ("tp", "dp", "pp", "world")}
    proof = holmes.check(made, topology)
    host = {rank: host.name for host in topology.hosts for rank in host.ranks}
    cluster = {rank: cluster.name for cluster in topology.clusters for rank in cluster.ranks}
    rows = {row.kind: row for row in proof.rows}
    assert rows["tp"].wrong == sum(len({host[rank] for rank in ranks}) > 1 for ranks in made["tp"]) > 0
    assert rows["dp"].wrong == sum(len({cluster[rank] for rank in ranks}) > 1 for ranks in made["dp"]) > 0
    assert rows["pp"].wrong == rows["world"].wrong == 0
    assert proof.fix is not None
    assert proof.fix.startswith("these sizes fit (tensor=4, pipeline=2), in another order of ranks: holmes.plan_for(")
    plan = holmes.plan_for(topology, model_layers=8, tensor=4, pipeline=2)
    assert holmes.check({kind: plan.grid.groups(kind).tolist() for kind in made}, topology).holds


def test_a_tensor_group_that_leaves_its_host() -> None:
    proof = holmes.check({"tp": [[0, 1], [2, 4], [3, 5]], "dp": [[0, 8, 9]]}, two_clusters(ranks_per_host=4))
    tensor, data = proof.violations
    assert (tensor.groups, tensor.ranks, tensor.slowdown) == (2, (2, 4), None)
    assert "leaves its host, over cluster 0, so it runs on infiniband" in tensor.problem
    assert "crosses cluster 0 and cluster 1, so it runs on ethernet 10.9.0.0/24, 25 Gbit/s instead of " in data.problem
    assert "its bytes take 8 times as long" in data.problem


def test_groups_without_a_network() -> None:
    whole = two_clusters()
    topology = make_topology(whole.hosts, [fabric for fabric in whole.fabrics if fabric.nic_class != "ethernet"])
    proof = holmes.check({"pp": [[0, 2]]}, topology)
    assert "which share no network: it cannot communicate" in proof.violations[0].problem
    with pytest.raises(ValueError, match=r"ranks \[0, 2\] of a pipeline group share no network \(n0: ib0 infin"):
        holmes.plan_for(topology, model_layers=4, pipeline=2)


def test_groups_that_are_none() -> None:
    topology = two_clusters()
    for groups, words in (
        ({"sp": [[0, 1]]}, "no groups of kind 'sp'; kinds are dp_cp"),
        ({"dp": [[0, 4]]}, r"dp group \[0, 4\] must hold ranks of 0 to 3, each at most once"),
        ({"dp": [[1, 1]]}, r"dp group \[1, 1\] must hold"),
        ({"dp": [[]]}, r"dp group \[\] must hold"),
        ({}, "there are no groups to check; give lists of ranks by kind"),
        ({"dp": []}, "there are no groups to check"),
        ({"dp": [[0, 1], [2, 3], [1, 3]]}, r"dp groups \[0, 1\] and \[1, 3\] both hold rank 1"),
    ):
        with pytest.raises(ValueError, match=words):
            holmes.check(groups, topology)


def changed(topology: Topology, host: int, nic_class: str) -> Topology:
    """With the first NIC of a host being of another class."""
    hosts = list(topology.hosts)
    first, *others = hosts[host].ports
    hosts[host] = dataclasses.replace(hosts[host], ports=(dataclasses.replace(first, nic_class=nic_class), *others))
    return make_topology(hosts, candidate_fabrics(hosts))


def test_a_plan_for_other_machines() -> None:
    topology = topology_of([[2, 2, 2], [2, 2]])
    plan = holmes.plan_for(topology, model_layers=5, tensor=2, pipeline=5)
    assert holmes.check(plan, topology).holds
    proof = holmes.check(plan, changed(topology, 1, "ethernet"))
    problems = [violation.problem for violation in proof.violations]
    assert "host c0h1 has no NIC nic0_0 of class infiniband; it has nic0_0 (ethernet), eth0 (ethernet)" in problems
    smaller = topology_of([[2, 2], [2, 2]])
    assert "it is for 10 ranks, the topology has 8" in holmes.check(plan, smaller).describe()
    moved = holmes.check(plan, topology_of([[2, 2, 2], [2, 2]], random.Random(2)))
    assert "are not those of one host of the topology" in moved.describe()
    broken = dataclasses.replace(topology, fabrics=topology.fabrics[2:])
    replanned = holmes.plan_for(topology, model_layers=2, tensor=2, pipeline=1, span_clusters=True)
    assert holmes.check(replanned, broken).violations


def test_command_line(tmp_path: Path) -> None:
    topology = two_clusters(ranks_per_host=2)
    topology.save(tmp_path / "topology.yaml")
    good = holmes.plan_for(topology, model_layers=4, pipeline=2)
    bad = holmes.plan_for(topology, model_layers=4, pipeline=1, span_clusters=True)
    good.save(tmp_path / "good.json")
    bad.save(tmp_path / "bad.yaml")
    (tmp_path / "groups.yaml").write_text(yaml.safe_dump({"groups": {"tp": [[0, 1], "2-3"], "dp": ["0-6:2"]}}))
    (tmp_path / "wrong.json").write_text(json.dumps({"kind": "shopping list"}))
    app = load("tools.cli.plan:app")
    outcomes = {"good.json": (0, "Every group keeps"), "bad.yaml": (1, "WRONG dp: 1 groups such as [0, 1, 2")}
    outcomes |= {"groups.yaml": (1, "crosses cluster 0 and cluster 1"), "wrong.json": (2, "neither a plan")}
    for name, (code, words) in outcomes.items():
        result = CliRunner().invoke(app, ["check", str(tmp_path / name), "--topology", str(tmp_path / "topology.yaml")])
        assert (result.exit_code, words in result.output) == (code, True), result.output
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "good.json"), "--rank", "5"])
    assert "pp [1, 5]: spans clusters; best network that all 2 ranks share: ethernet 10.9.0.0/24" in " ".join(
        shown.output.split()
    )
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "good.json")])
    assert "8 ranks = tensor 1 x data 4 x pipeline 2" in shown.output
    assert CliRunner().invoke(app, ["show", str(tmp_path / "good.json"), "--kind", "x"]).exit_code == 2
