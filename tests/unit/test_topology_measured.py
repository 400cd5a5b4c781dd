"""What follows from measured pairs and from contradictions: the rules, without a network; and the schedule of pairs."""

from __future__ import annotations

import itertools
import os
import random
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from test_groups import loopback
from topologies import hosts_of, port

from holmes.cluster.probe.discover import discover_topology, local_gpu
from holmes.cluster.probe.exchange import Exchange
from holmes.cluster.probe.meter import Meter
from holmes.cluster.probe.rates import pack, tournament
from holmes.cluster.probe.stream import Listener, Window, _ping, dial
from holmes.cluster.topology import Fabric, Host, Port, candidate_fabrics, make_topology
from holmes.cluster.topology.contradictions import contradictions, mixed_wires
from holmes.cluster.topology.fabrics import components
from holmes.cluster.topology.measured import (
    PairRate,
    host_rates,
    measured_fabrics,
    pairs_of,
    parts_of,
    questions,
    slow_hosts,
)
from holmes_comm import LocalStore


def fabric_of(names: Iterable[str], nic_class: str = "ethernet") -> Fabric:
    return Fabric(f"{nic_class} s", nic_class, "s", 1.0, dict.fromkeys(names, "nic0"), True)


def hosts_with(names: Iterable[str], nic_class: str = "ethernet") -> dict[str, Host]:
    ports = (Port("nic0", nic_class, "", "s", 1.0),)
    return {name: Host(name, name, (rank,), ports) for rank, name in enumerate(names)}


def pair(one: str, other: str, gbps: float, limited: bool = False) -> PairRate:
    return PairRate(((one, "nic0"), (other, "nic0")), gbps, 1e-5, limited)


def all_pairs(names: str, slow: dict[str, float], cross: float = 1.0, groups: tuple[str, ...] = ()) -> list[PairRate]:
    """Every pair: as fast as its slower host, and `cross` times that between groups."""
    group = {name: number for number, members in enumerate(groups) for name in members}
    return [
        pair(a, b, min(slow.get(a, 1.0), slow.get(b, 1.0)) * (1.0 if group.get(a) == group.get(b) else cross))
        for a, b in itertools.combinations(names, 2)
    ]


# The rule


def test_equal_hosts_are_one_fabric_with_its_median() -> None:
    fabric = fabric_of("abcd")
    found = measured_fabrics(fabric, hosts_with("abcd"), all_pairs("abcd", {"d": 0.8}))
    assert [(f.name, f.measured_gbps, f.measured_min_gbps, f.latency_s) for f in found] == [
        ("ethernet s", 0.9, 0.8, 1e-5)
    ]
    assert found[0].ports == fabric.ports
    assert slow_hosts(fabric, hosts_with("abcd"), all_pairs("abcd", {"d": 0.8})) == []


def test_a_slow_uplink_makes_two_clusters() -> None:
    fabric, hosts = fabric_of("abcdef"), hosts_with("abcdef")
    pairs = all_pairs("abcdef", {}, cross=0.1, groups=("abc", "def"))
    found = measured_fabrics(fabric, hosts, pairs)
    assert [(f.name, "".join(f.ports), f.measured_gbps) for f in found] == [
        ("ethernet s part 1", "abc", 1.0),
        ("ethernet s part 2", "def", 1.0),
        ("ethernet s", "abcdef", 0.1),
    ]
    topology = make_topology(list(hosts.values()), found)
    assert [cluster.hosts for cluster in topology.clusters] == [("a", "b", "c"), ("d", "e", "f")]
    assert [f.name for f in topology.shared_fabrics([0, 1])] == ["ethernet s part 1"]
    assert [f.name for f in topology.shared_fabrics([0, 5])] == ["ethernet s"]
    assert slow_hosts(fabric, hosts, pairs) == []


def test_busy_processors_do_not_join_what_is_apart() -> None:
    """A host that streamed next to nothing to itself in a busy moment: its NIC's nominal rate says nothing then."""
    fabric, hosts = fabric_of("abcdef"), hosts_with("abcdef")
    pairs = all_pairs("abcdef", {}, cross=0.05, groups=("abc", "def"))
    limited = [PairRate(one.nics, one.gbps, one.latency_s, host_limited=True) for one in pairs]
    found = measured_fabrics(fabric, hosts, limited)
    assert [(f.host_limited, f.rate_gbps) for f in found] == [(True, 1.0), (True, 1.0), (False, 0.05)]
    topology = make_topology(list(hosts.values()), found)
    assert [cluster.hosts for cluster in topology.clusters] == [("a", "b", "c"), ("d", "e", "f")]


def test_an_uplink_half_as_fast_does_not() -> None:
    pairs = all_pairs("abcdef", {}, cross=0.5, groups=("abc", "def"))
    assert parts_of(fabric_of("abcdef"), pairs) == [list("abcdef")]


def test_a_slow_nic_is_reported_by_name_and_stays_in_its_cluster() -> None:
    fabric, hosts = fabric_of("abcd", "infiniband"), hosts_with("abcd", "infiniband")
    pairs = all_pairs("abcd", {"c": 0.1})
    assert parts_of(fabric, pairs) == [list("abcd")]
    (finding,) = slow_hosts(fabric, hosts, pairs)
    assert str(finding).startswith("host c NIC nic0 (slow): 0.1 Gbit/s, 0.1 of the others' 1 on infiniband s. To do: ")


def test_a_fabric_far_below_its_line_rate_is_reported_unless_the_hosts_bound_it() -> None:
    fabric, hosts = fabric_of("ab"), hosts_with("ab")
    (finding,) = slow_hosts(fabric, hosts, [pair("a", "b", 0.2)])
    assert (finding.kind, finding.host, finding.nic) == ("below line rate", "a, b", "nic0")
    assert "0.2 Gbit/s on ethernet s, 0.2 of the line rate of 1" in finding.problem
    assert slow_hosts(fabric, hosts, [pair("a", "b", 0.2, limited=True)]) == []
    (limited,) = measured_fabrics(fabric, hosts, [pair("a", "b", 0.2, limited=True)])
    assert (limited.measured_gbps, limited.host_limited, limited.rate_gbps) == (0.2, True, 1.0)


def test_unmeasured_hosts_are_trusted() -> None:
    assert parts_of(fabric_of("abcdef"), []) == [list("abcdef")]
    assert parts_of(fabric_of("abcdef"), [pair("a", "b", 1.0)]) == [list("abcdef")]
    assert questions(fabric_of("abcdef"), [pair("a", "b", 1.0)]) == []
    assert measured_fabrics(fabric_of("ab"), hosts_with("ab"), []) == [fabric_of("ab")]


def test_what_looks_slow_or_apart_is_measured_again_and_the_better_counts() -> None:
    fabric, hosts = fabric_of("abcd"), hosts_with("abcd")
    busy = all_pairs("abcd", {}, cross=0.2, groups=("ab", "cd"))
    asked = questions(fabric, busy)
    assert len(asked) == 1
    again = pairs_of(fabric, hosts, [*busy, pair(*asked[0], 0.9)])
    assert len(again) == len(busy)
    assert parts_of(fabric, again) == [list("abcd")]
    slow = all_pairs("abcd", {"d": 0.2})
    assert [sorted(pair) for pair in questions(fabric, slow)] == [["a", "d"]]
    assert slow_hosts(fabric, hosts, pairs_of(fabric, hosts, [*slow, pair("d", "a", 1.0)])) == []


@pytest.mark.parametrize("seed", range(40))
def test_sampled_pairs_find_random_clusters(seed: int) -> None:
    """Hosts in any order, several clusters, a tenth of the rate between them: tournament and questions find them."""
    dice = random.Random(seed)
    names = [f"h{i}" for i in range(dice.randint(20, 90))]
    clusters = dice.choice([1, 2, 3])
    cluster = {name: dice.randrange(clusters) for name in names}
    if dice.random() < 0.7:
        names.sort(key=cluster.__getitem__)  # addresses mostly follow the clusters
    slow = dict.fromkeys(dice.sample(names, 1), 0.1)
    fabric = fabric_of(names)
    hosts = hosts_with(names)

    def measure(one: str, other: str) -> PairRate:
        own = min(slow.get(one, 1.0), slow.get(other, 1.0))
        return pair(one, other, min(own, 1.0 if cluster[one] == cluster[other] else 0.1) * dice.uniform(0.9, 1.0))

    pairs = [measure(*hosts) for hosts in itertools.chain.from_iterable(tournament(names, 12))]
    rounds = pack([[[hosts] for hosts in questions(fabric, pairs)]], 40)
    pairs += [measure(one, other) for pairs_now in rounds for _, one, other in pairs_now]
    known = pairs_of(fabric, hosts, pairs)
    where = {name: index for index, part in enumerate(parts_of(fabric, known)) for name in part}
    sure = [name for name in names if name not in slow and sum(name in p.hosts for p in known) > 2]
    for one, other in itertools.combinations(sure, 2):
        assert (where[one] == where[other]) == (cluster[one] == cluster[other])
    assert next(iter(slow)) in [finding.host for finding in slow_hosts(fabric, hosts, known)]


# The schedule


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_few_hosts_all_meet_once_in_disjoint_pairs(count: int) -> None:
    names = [f"h{i}" for i in range(count)]
    rounds = tournament(names, 100)
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, met)) == sorted(map(sorted, itertools.combinations(names, 2)))
    for pairs in rounds:
        hosts = [host for pair in pairs for host in pair]
        assert len(hosts) == len(set(hosts))


@pytest.mark.parametrize("count", [17, 64, 1000, 12_500])
def test_many_hosts_meet_in_log_rounds_that_join_them_all(count: int) -> None:
    names = [f"h{i}" for i in range(count)]
    rounds = tournament(names, 100)
    assert len(rounds) == (count - 1).bit_length()
    pairs = [pair(*hosts, 1.0) for round_pairs in rounds for hosts in round_pairs]
    assert len(host_rates(pairs)) == count
    assert len(components(names, [p.hosts for p in pairs])) == 1
    assert len(tournament(names, 3)) == 3


def test_networks_share_rounds_where_their_hosts_differ() -> None:
    wishes = [tournament("ab", 9), tournament("cd", 9), tournament("abcd", 9)]
    packed = pack(wishes, 9)
    assert len(packed) == 4  # infiniband and roce side by side, then the Ethernet's three rounds
    assert {network for network, _, _ in packed[0]} == {0, 1}
    for pairs in packed:
        hosts = [host for _, *both in pairs for host in both]
        assert len(hosts) == len(set(hosts))
    assert [{network for network, _, _ in pairs} for pairs in pack(wishes, 2)] == [{0, 1}, {2}]


# Contradictions


def found_in(*ports: list[Port], apart: Iterable[int] = ()) -> list[str]:
    """Findings where all hosts of a subnet reach each other, but those in `apart` nobody."""
    hosts = hosts_of(*ports)
    gone = {f"id{host}" for host in apart}

    def connected(fabric: Fabric) -> Fabric:
        ports = {host_id: nic for host_id, nic in fabric.ports.items() if host_id not in gone}
        return Fabric(fabric.name, fabric.nic_class, fabric.subnet, fabric.speed_gbps, ports, True)

    assumed = candidate_fabrics(hosts)
    confirmed = [f for f in map(connected, assumed) if len(f.ports) > 1]
    return [
        str(finding) for finding in contradictions(hosts, assumed, confirmed, list(map(connected, mixed_wires(hosts))))
    ]


def test_nothing_is_found_where_all_is_well() -> None:
    clusters = [[port("infiniband", f"10.1.0.{h}"), port("ethernet", f"10.9.0.{h}", 25)] for h in (1, 2)]
    clusters += [[port("roce_v2", f"10.9.0.{h}", 200)] for h in (3, 4)]  # its RoCE NIC is on the common Ethernet
    assert found_in(*clusters) == []


def test_a_class_unlike_the_others_on_the_wire() -> None:
    ports = [[port("infiniband", f"10.1.0.{h}")] for h in (1, 2, 3)] + [[port("roce_v2", "10.1.0.4")]]
    (found,) = found_in(*ports)
    assert found.startswith(
        "host n3 NIC roce0 (class): says roce_v2, but reaches over 10.1.0.0/24 n0 ib0, n1 ib0, n2 ib0, "
        "which say infiniband. To do: "
    )


def test_one_of_two_classes_is_wrong_but_which() -> None:
    found = found_in([port("infiniband", "10.1.0.1")], [port("roce_v2", "10.1.0.2")])
    assert [text.split(" (")[0] for text in found] == ["host n0 NIC ib0", "host n1 NIC roce0"]
    assert all("one side is wrong, it cannot be told which" in text for text in found)


def test_a_class_that_reaches_none_of_its_peers() -> None:
    ports = [[port("infiniband", f"10.1.0.{h}"), port("ethernet", f"10.9.0.{h}")] for h in (1, 2, 3)]
    ports.append([port("infiniband", "10.1.0.4")])
    (found,) = found_in(*ports, apart=[3])
    assert (
        "host n3 NIC ib0 (unreachable): says infiniband in 10.1.0.0/24, but reaches none of n0, n1, n2 there" in found
    )


def test_an_address_twice() -> None:
    ports = [[port("infiniband", f"10.1.0.{h}")] for h in (1, 2, 3, 3)]
    found = found_in(*ports, apart=[3])
    assert "its address 10.1.0.3 is also another host's. To do: give every NIC an address of its own" in found[0]


def test_bridges_of_containers_are_no_contradiction() -> None:
    ports = [[port("ethernet", f"10.9.0.{h}"), port("ethernet", "172.17.0.1", name="docker0")] for h in (1, 2)]
    hosts = hosts_of(*ports)
    assumed = candidate_fabrics(hosts)
    assert contradictions(hosts, assumed, [f for f in assumed if "172" not in f.subnet], []) == []


def test_missing_rdma_driver_and_another_roce_version() -> None:
    ports = [[port("roce_v2", f"10.2.0.{h}")] for h in (1, 2, 3)]
    found = found_in(*ports, [port("ethernet", "10.2.0.4")], [port("roce_v1", "10.2.0.5", name="r1")])
    assert (
        "host n3 NIC eth0 (class): says ethernet, but the 3 other NICs like it in 10.2.0.0/24 say roce_v2" in found[0]
    )
    assert "load its RDMA driver" in found[0]
    assert "host n4 NIC r1 (class): says roce_v1" in found[1]


def test_a_link_that_came_up_slow_and_a_subnet_of_its_own() -> None:
    ports = [[port("infiniband", f"10.1.0.{h}", 200 if h < 3 else 100)] for h in (1, 2, 3)]
    found = found_in(*ports, [port("infiniband", "10.3.0.9", 200)])
    assert (
        "host n2 NIC ib0 (line rate): says 100 Gbit/s, where the others in infiniband 10.1.0.0/24 say 200" in found[0]
    )
    assert "host n3 NIC ib0 (alone): says infiniband in 10.3.0.0/24, which no other host shares; 3 hosts" in found[1]


# The GPUs


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("echo 'NVIDIA H100 80GB HBM3, 81559'\necho 'NVIDIA H100 80GB HBM3, 81559'", ("NVIDIA H100 80GB HBM3", 79.6)),
        ("echo 'NVIDIA H100 80GB HBM3, 81559'\necho 'NVIDIA T4, 15360'", None),
        ("echo 'No devices were found'; exit 6", None),
        ("echo 'NVIDIA GB10, [N/A]'", None),
    ],
)
def test_gpus_as_nvidia_smi_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, found: tuple[str, float] | None
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{answer}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert local_gpu() == found


# The measurement over loopback


WINDOW = Window(0.01, 0.05)


def meter_by_threads(
    hosts: tuple[Host, ...], fabric: Fabric, rounds: list[list[tuple[str, str]]]
) -> list[list[PairRate]]:
    store, results = LocalStore(), {}

    def rank_main(rank: int, size: int) -> None:
        with Meter(Exchange(store, rank, size, "meter"), hosts, WINDOW, timeout_s=1.0) as meter:
            results[rank] = meter.measure([[(fabric, *pair) for pair in pairs] for pairs in rounds])

    size = sum(len(host.ranks) for host in hosts)
    threads = [threading.Thread(target=rank_main, args=(rank, size)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(results[rank] == results[0] for rank in range(size))
    return results[0]


def test_hosts_measure_each_other_and_all_ranks_know() -> None:
    hosts = hosts_of([loopback(1)], [loopback(2)], [loopback(3)], ranks_per_host=2)
    (fabric,) = candidate_fabrics(hosts)
    rounds = tournament(list(fabric.ports), 9)
    found = meter_by_threads(hosts, fabric, rounds)
    assert [len(pairs) for pairs in found] == [1, 1, 1]
    for pairs in found:
        assert pairs[0].gbps > 0
        assert 0 < pairs[0].latency_s < 1


def test_a_host_out_of_reach_costs_its_pairs_only() -> None:
    nowhere = Port("nic0", "roce_v2", "192.0.2.7", "127.0.1.0/24", 1.0)  # an address this machine does not have
    hosts = hosts_of([loopback(1)], [nowhere], [loopback(3)])
    (fabric,) = candidate_fabrics(hosts)
    found = meter_by_threads(hosts, fabric, [[("id0", "id1")], [("id1", "id2")], [("id2", "id0")]])
    assert [len(pairs) for pairs in found] == [0, 0, 1]


def test_a_door_drops_strangers_and_late_comers() -> None:
    listener = Listener("127.0.0.1", "0123456789abcdef")
    try:
        address = ("127.0.0.1", listener.port)
        deadline_s = time.monotonic() + 10
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            late = dial("127.0.0.1", address, listener.token, "1/0/0", deadline_s)
            right = dial("127.0.0.1", address, listener.token, "1/1/0", deadline_s)
            admitted = listener.admit("1/1/0", deadline_s)
        assert sorted(admitted) == ["back", "there"]
        right["there"].sendall(b"x")
        assert admitted["there"].recv(1) == b"x"
        for connections in (late, right, admitted):
            for connection in connections.values():
                connection.close()
        with pytest.raises(TimeoutError):
            listener.admit("1/2/0", time.monotonic() + 0.1)
    finally:
        listener.close()


@pytest.mark.parametrize("slow_of_ten", [0, 8])
def test_latency_is_the_wires_also_where_hosts_are_busy(slow_of_ten: int) -> None:
    """One Ethernet had 30 us in one table of a run and 1.56 ms in the next."""
    slow_s = 0.02
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        trip = 0
        while connection.recv(1):
            if trip % 10 < slow_of_ten:
                time.sleep(slow_s)
            connection.sendall(b"p")
            trip += 1

    far = threading.Thread(target=answer, daemon=True)
    far.start()
    with socket.create_connection(listener.getsockname(), 5) as near:
        assert _ping(near) < slow_s / 4
    far.join(5)
    listener.close()


@pytest.mark.parametrize(("timeout_s", "measure_s"), [(0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (3.0, -1.0)])
def test_times_that_are_none_are_refused(timeout_s: float, measure_s: float) -> None:
    with pytest.raises(ValueError, match=f"timeout_s={timeout_s}, measure_s={measure_s}: seconds, timeout_s above 0"):
        discover_topology(LocalStore(), 0, 1, "times", timeout_s, measure_s)
