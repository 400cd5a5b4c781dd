"""Topology, clusters, groups and the reachability check, without torch."""

import dataclasses
import socket
import threading
import time

import pytest
from topologies import assumed, hosts_of, ib, port, roce, topology_of, two_clusters

from holmes.cluster.probe import Exchange, Responder, confirm_fabrics, local_inventory, reaches, usable_ports
from holmes.cluster.topology import (
    Host,
    NodeInventory,
    Port,
    Topology,
    candidate_fabrics,
    find_clusters,
    make_fabric,
    make_topology,
    merge_hosts,
)
from holmes.planning.groups import Group
from holmes.planning.groups.sizes import Sizes, possible_pipelines
from holmes.planning.partition import split_evenly
from holmes.planning.plan import Plan, plan_for
from holmes_comm import _C, LocalStore


def plan_of(topology: Topology, tensor: int, pipeline: int) -> Plan:
    return plan_for(topology, model_layers=24, tensor=tensor, pipeline=pipeline)


def stages_of(plan: Plan) -> list[tuple[int, ...]]:
    return [plan.ranks_of_stage(stage) for stage in range(plan.pipeline)]


def first_group(topology: Topology, kind: str, pipeline: int) -> Group:
    return plan_of(topology, 1, pipeline).groups(kind)[0]


def test_clusters_follow_from_the_nics() -> None:
    clusters = two_clusters().clusters
    assert [(c.ranks, c.nic_class) for c in clusters] == [((0, 1), "infiniband"), ((2, 3), "roce_v2")]


def test_ranks_in_any_order_over_the_hosts() -> None:
    ports = {"a0": ib(1), "b0": roce(3), "a1": ib(2), "b1": roce(4)}
    order = ["b0", "a0", "a1", "b1", "a1", "b0", "b1", "a0"]
    hosts = merge_hosts([NodeInventory(rank, host, host, tuple(ports[host])) for rank, host in enumerate(order)])
    topology = assumed(hosts)
    assert [c.ranks for c in topology.clusters] == [(0, 5, 3, 6), (1, 7, 2, 4)]
    plan = plan_of(topology, tensor=2, pipeline=2)
    assert stages_of(plan) == [(0, 5, 3, 6), (1, 7, 2, 4)]
    assert [g.ranks for g in plan.groups("dp")] == [(0, 3), (5, 6), (1, 2), (7, 4)]
    assert [g.ranks for g in plan.groups("pp")] == [(0, 1), (5, 7), (3, 2), (6, 4)]


def without_ip(number: int, speed_gbps: float = 100) -> list[Port]:
    gid = Port(f"mlx5_{number % 2}:1", "roce_v2", f"fe80::{number}", "GID fe80::/64", speed_gbps)
    return [gid, port("ethernet", f"10.9.0.{number}", 25)]


def test_ports_without_ip_are_a_network_of_their_own() -> None:
    """Their GIDs' prefix says nothing of who reaches whom; they are no rails of others, as verbs use one port."""
    hosts = hosts_of(*(without_ip(number) for number in (2, 4, 6, 8)))
    (bare, ethernet) = candidate_fabrics(hosts)
    assert (bare.name, len(bare.ports)) == ("roce_v2 GID fe80::/64", 4)
    assert ethernet.nic_class == "ethernet"
    parts = [
        make_fabric(f"roce_v2 GID fe80::/64{part}", "roce_v2", "GID fe80::/64", members, confirmed=True)
        for part, members in (
            ("", {host.host_id: host.ports[0] for host in hosts[:2]}),
            (" (2)", {host.host_id: host.ports[0] for host in hosts[2:]}),
        )
    ]
    topology = make_topology(hosts, [*parts, ethernet])
    assert [(c.ranks, c.nic_class) for c in topology.clusters] == [((0, 1), "roce_v2"), ((2, 3), "roce_v2")]
    assert Topology.from_dict(topology.to_dict()) == topology
    plan = Plan.from_dict(plan_of(topology, tensor=1, pipeline=2).to_dict())
    dp, pp = plan.groups("dp")[0], plan.groups("pp")[0]
    assert (dict(dp.nics), dp.is_verbs_only) == ({0: ("mlx5_0:1",), 1: ("mlx5_0:1",)}, True)
    assert (dict(pp.nics), pp.is_verbs_only) == ({0: ("eth0",), 2: ("eth0",)}, False)
    world = plan.groups("world")[0]  # TCP joins it, and TCP is what its ranks have inside a cluster
    assert (dict(world.cluster_nics), world.is_verbs_only) == (dict(world.nics), False)


def test_ports_without_ip_are_no_rails() -> None:
    hosts = hosts_of(*([*without_ip(number), port("roce_v2", f"10.2.0.{number}", 100)] for number in (2, 4)))
    topology = make_topology(hosts, candidate_fabrics(hosts))
    group = first_group(topology, "dp", 1)
    assert [len(nics) for nics in group.nics.values()] == [1, 1]


def test_every_group_is_on_the_best_nic_its_ranks_share() -> None:
    plan = plan_of(two_clusters(ranks_per_host=2), tensor=2, pipeline=2)
    groups = [group for kind in ("tp", "dp", "pp") for group in plan.groups(kind)]
    chosen = {(g.kind, g.ranks): (g.nic_class, dict(g.nics)) for g in groups}
    assert chosen["tp", (0, 1)] == (None, {})
    assert chosen["dp", (0, 2)] == ("infiniband", {0: ("ib0",), 2: ("ib0",)})
    assert chosen["dp", (5, 7)] == ("roce_v2", {5: ("roce0",), 7: ("roce0",)})
    assert chosen["pp", (0, 4)] == ("ethernet", {0: ("eth0",), 4: ("eth0",)})
    reasons = {g.kind: g.reason for g in groups}
    assert "10.9.0.0/24, 25 Gbit/s" in reasons["pp"]
    assert "shared memory" in reasons["tp"]


def test_rails_of_equal_speed_serve_a_group_together() -> None:
    ports = [[port("roce_v2", f"10.{rail}.0.{host}", name=f"rdma{rail}") for rail in (1, 2)] for host in (1, 2)]
    group = first_group(assumed(hosts_of(*ports)), "dp", 1)
    assert group.nics == {0: ("rdma1", "rdma2"), 1: ("rdma1", "rdma2")}


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [(2, {"dp": None, "pp": 3, "embd": 1, "world": 0}), (4, {"dp": None, "pp": 3, "world": 0})],
)
def test_what_spans_clusters_has_the_priority_of_its_kind(pipeline: int, expected: dict[str, int | None]) -> None:
    plan = plan_of(two_clusters(ranks_per_host=2), 1, pipeline)
    assert {kind: plan.groups(kind)[0].priority for kind in expected} == expected


def test_without_stages_or_other_clusters_there_are_no_priorities() -> None:
    plan = plan_for(two_clusters(), model_layers=24, span_clusters=True)
    assert {plan.groups(kind)[0].priority for kind in ("dp", "world")} == {None}
    assert first_group(assumed(hosts_of(ib(1), ib(2))), "pp", 2).priority is None


def test_a_roce_nic_on_the_common_ethernet_counts_as_ethernet_too() -> None:
    roce_only = [[port("roce_v2", f"10.9.0.{host}")] for host in (3, 4)]
    topology = assumed(hosts_of(ib(1), ib(2), *roce_only))
    assert [c.nic_class for c in topology.clusters] == ["infiniband", "roce_v2"]
    group = first_group(topology, "pp", 2)
    assert (group.nic_class, dict(group.nics)) == ("ethernet", {0: ("eth0",), 2: ("roce0",)})


def test_clusters_joined_by_routers() -> None:
    ports = [
        [port("infiniband", f"10.{1 + site}.0.{host}"), port("ethernet", f"10.{8 + site}.0.{host}", 25, gateway=True)]
        for site in (0, 1)
        for host in (1, 2)
    ]
    topology = assumed(hosts_of(*ports))
    assert [c.ranks for c in topology.clusters] == [(0, 1), (2, 3)]
    group = first_group(topology, "pp", 2)
    assert "routed" in group.reason


def test_ethernet_only_hosts_form_a_cluster_of_their_own() -> None:
    ethernet = [[port("ethernet", f"10.9.0.{host}", 25)] for host in (5, 6)]
    clusters = assumed(hosts_of(ib(1), ib(2), *ethernet)).clusters
    assert [(c.ranks, c.nic_class) for c in clusters] == [((0, 1), "infiniband"), ((2, 3), "ethernet")]


def test_clusters_of_different_size() -> None:
    topology = assumed(hosts_of(*[ib(h) for h in range(1, 5)], *[roce(h) for h in (5, 6)]))
    assert possible_pipelines(topology, Sizes()) == [3, 6]
    assert stages_of(plan_of(topology, 1, 3)) == [(0, 1), (2, 3), (4, 5)]


@pytest.mark.parametrize(
    ("tensor", "pipeline", "message"),
    [
        (3, 2, r"tensor=3 must divide the ranks of every host \(n0: 2, .*nearest sizes that fit: tensor=2, pipeline=2"),
        (1, 3, r"8 ranks / pipeline=3 is not a whole.*fit: tensor=1, pipeline=4 .*as they are: pipeline 2, 4, 8\)"),
        (1, 1, r"a stage of 8 ranks .* every cluster \(cluster 0: 4, cluster 1: 4\).*fit: tensor=1, pipeline=2 "),
        (0, 2, r"tensor=0 must be at least 1.*fit: tensor=1, pipeline=2"),
        (2, 0, r"pipeline=0 must be at least 1.*fit: tensor=2, pipeline=2"),
    ],
)
def test_sizes_that_do_not_fit_name_numbers_and_fix(tensor: int, pipeline: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(two_clusters(ranks_per_host=2), tensor, pipeline)


def test_no_shared_network_is_an_error() -> None:
    topology = assumed(hosts_of(ib(1), ib(2), [port("roce_v2", "10.2.0.3")], [port("roce_v2", "10.2.0.4")]))
    with pytest.raises(ValueError, match=r"ranks \[0, 2\] of a pipeline group share no network \(n0: ib0 .*n2: roce0"):
        plan_of(topology, 1, 2)


def test_layers_split_evenly() -> None:
    assert split_evenly(30, 4) == (8, 8, 7, 7)
    with pytest.raises(ValueError, match=r"3 layers cannot fill 4 pipeline stages; use pipeline=3"):
        split_evenly(3, 4)


def test_wrong_ranks_in_inventories() -> None:
    with pytest.raises(ValueError, match=r"ranks 0 to 1, once each; got \[0, 0\]"):
        merge_hosts([NodeInventory(0, "a", "a", ()), NodeInventory(0, "b", "b", ())])


def test_usable_ports() -> None:
    nics = [
        {"name": "lo", "nic_class": "loopback", "is_netdev_up": True, "addresses": ["127.0.0.1/8"]},
        {"name": "eth1", "nic_class": "ethernet", "is_netdev_up": False, "addresses": ["10.0.0.1/24"]},
        {"name": "ib0", "nic_class": "infiniband", "is_netdev_up": True, "addresses": []},
        {"name": "eth2", "nic_class": "ethernet", "is_netdev_up": True, "addresses": ["fe80::1/64", "10.0.0.2/24"]},
    ]
    found = usable_ports([{"speed_gbps": 25.0, "has_gateway": True, "parent": "", **nic} for nic in nics])
    assert found == (Port("eth2", "ethernet", "10.0.0.2", "10.0.0.0/24", 25.0, True),)


def test_a_host_is_called_as_the_job_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLMES_HOSTNAME", "n7")
    found = local_inventory(3)
    assert (found.rank, found.host, found.host_id) == (3, "n7", _C.host_identity())


def confirmed_by_threads(hosts: tuple[Host, ...], timeout_s: float = 0.5) -> list[tuple[str, set[str]]]:
    """confirm_fabrics on one thread per rank; every rank must find the same."""
    store, results = LocalStore(), {}

    def rank_main(rank: int, size: int) -> None:
        exchange = Exchange(store, rank, size, "probe")
        results[rank] = confirm_fabrics(exchange, hosts, candidate_fabrics(hosts), timeout_s)

    size = sum(len(host.ranks) for host in hosts)
    threads = [threading.Thread(target=rank_main, args=(rank, size)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(results[rank] == results[0] for rank in range(size))
    assert all(fabric.confirmed for fabric in results[0])
    return [(fabric.name, set(fabric.ports)) for fabric in results[0]]


def loopback(host: int, nic_class: str = "roce_v2") -> Port:
    return Port("nic0", nic_class, f"127.0.1.{host}", "127.0.1.0/24", 1.0)


def test_reachable_fabrics_are_confirmed() -> None:
    hosts = hosts_of([loopback(1)], [loopback(2)], [loopback(3)], ranks_per_host=2)
    assert confirmed_by_threads(hosts) == [("roce_v2 127.0.1.0/24", {"id0", "id1", "id2"})]


def test_a_host_that_cannot_be_reached_is_left_out() -> None:
    nowhere = Port("nic0", "roce_v2", "192.0.2.7", "127.0.1.0/24", 1.0)  # an address this machine does not have
    hosts = hosts_of([loopback(1)], [nowhere], [loopback(3)])
    assert confirmed_by_threads(hosts) == [("roce_v2 127.0.1.0/24", {"id0", "id2"})]


def test_one_subnet_on_two_wires_becomes_two_fabrics(monkeypatch: pytest.MonkeyPatch) -> None:
    wires = [{"127.0.1.1", "127.0.1.3"}, {"127.0.1.2", "127.0.1.4"}]

    def same_wire(source: str, target: tuple[str, int], token: str, timeout_s: float) -> bool:
        return any({source, target[0]} <= wire for wire in wires) and reaches(source, target, token, timeout_s)

    monkeypatch.setattr("holmes.cluster.probe.reach.reaches", same_wire)
    hosts = hosts_of(*([loopback(host)] for host in (1, 2, 3, 4)))
    found = confirmed_by_threads(hosts)
    assert [members for _, members in found] == [{"id0", "id2"}, {"id1", "id3"}]
    assert len({name for name, _ in found}) == 2


def test_the_same_address_on_two_hosts_is_no_connection() -> None:
    assert confirmed_by_threads(hosts_of([loopback(1)], [loopback(1)])) == []


def test_reaches_is_bounded_and_checks_who_answers() -> None:
    with Responder(["127.0.0.1"]) as responder:
        listener = ("127.0.0.1", responder.ports["127.0.0.1"])
        assert reaches("127.0.0.1", listener, responder.token, 1.0)
        assert not reaches("127.0.0.1", listener, "another token...", 1.0)
        assert not reaches("192.0.2.7", listener, responder.token, 1.0)  # source address not of this host
    assert not reaches("127.0.0.1", listener, responder.token, 1.0)  # closed
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        assert not reaches("127.0.0.1", ("127.0.0.1", silent.getsockname()[1]), responder.token, 0.3)
        assert time.monotonic() - started < 2.0


def test_hosts_without_a_fabric_are_clusters_of_one() -> None:
    clusters = find_clusters(hosts_of([], [], ranks_per_host=2), [])
    assert [(c.ranks, c.fabric) for c in clusters] == [((0, 1), None), ((2, 3), None)]


@pytest.mark.parametrize("rails", [1, 3])
def test_rails_are_those_of_the_topology(rails: int) -> None:
    """Group by group by another path, with a faster part inside a network: same NICs, no NIC twice."""
    topology = topology_of([[2, 2, 2], [4, 2]], rails=rails)
    part = dataclasses.replace(
        next(fabric for fabric in topology.fabrics if fabric.nic_class == "ethernet"),
        name="fast part",
        ports={"id0": "eth0", "id1": "eth0"},
        measured_gbps=24.0,
    )
    topology = make_topology(topology.hosts, [*topology.fabrics, part])
    plan = plan_for(topology, model_layers=12, pipeline=6, tensor=2)
    for kind in ("tp", "dp", "pp", "mp", "embd"):
        for group in plan.groups(kind):
            hosts = {rank: topology.host_of(rank) for rank in group.ranks}
            fabrics = topology.rails(group.ranks) if len({host.host_id for host in hosts.values()}) > 1 else ()
            expected = {
                rank: tuple(fabric.ports[host.host_id] for fabric in fabrics) for rank, host in hosts.items() if fabrics
            }
            assert group.nics == expected
