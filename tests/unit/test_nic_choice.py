"""One set of machines to the default group, the planned group, the NCCL group and C++: one answer (docs/nics.md)."""

from __future__ import annotations

import ipaddress
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from holmes.cluster.probe.discover import usable_ports
from holmes.cluster.topology import Host, NodeInventory, Port, Topology, candidate_fabrics, make_topology, merge_hosts
from holmes.lab.fake_sysfs import write_sysfs
from holmes.planning.groups.reach import Reach
from holmes.planning.plan import Plan, plan_for
from holmes_comm import _C, LocalStore, nic_agreement
from holmes_comm.errors import NicError
from holmes_comm.nccl_agreement import agree_nccl
from holmes_comm.nics import NicSelection, agree_nics, discover_nics

FIXTURES = Path(__file__).parent.parent / "fixtures" / "machines"
HOSTS = 2


def ethernet(name, address, speed_gbps):
    return {"name": name, "speed_gbps": speed_gbps, "addresses": [address] if address else []}


def rdma(name, nic_class, address, speed_gbps):
    return ethernet(name, address, speed_gbps) | {"nic_class": nic_class, "hca": f"mlx5_{name or 'bare'}"}


BESIDE = {
    "roce25_beside_ethernet100": [rdma("r0", "roce_v2", "10.1.0.1/24", 25), ethernet("e0", "10.2.0.1/24", 100)],
    "roce100_beside_ethernet100": [rdma("r0", "roce_v2", "10.2.0.1/24", 100), ethernet("e0", "10.1.0.1/24", 100)],
    "four_roce25_beside_ethernet100": [
        *(rdma(f"r{i}", "roce_v2", f"10.{i}.0.1/24", 25) for i in range(4)),
        ethernet("e0", "10.9.0.1/24", 100),
    ],
    "infiniband_without_interface": [rdma("", "infiniband", "", 400), ethernet("e0", "10.0.0.1/24", 25)],
    "nic_without_address": [ethernet("e1", "", 100), ethernet("e0", "10.0.0.1/24", 25)],
    # Machines as they are delivered: InfiniBand without IPoIB; a rail-optimised RoCE fabric, each port alone with its
    # switch; a desktop whose one port has two NICs, one for each half of its PCIe lanes.
    "eight_infiniband_without_addresses": [
        *({**rdma("", "infiniband", "", 400), "hca": f"mlx5_{i}"} for i in range(8)),
        ethernet("e0", "10.0.0.1/24", 100),
    ],
    "eight_routed_roce": [
        *(rdma(f"r{i}", "roce_v2", f"10.1.{i}.0/31", 400) for i in range(8)),
        ethernet("e0", "10.0.0.1/24", 25),
    ],
    # EFA devices have no interface of their own and speak neither InfiniBand nor RoCE.
    "efa": [
        *(
            {**rdma("", "roce_v2", "", 100), "hca": f"rdmap{16 + i}s27", "driver": "efa", "vendor": "0x1d0f"}
            for i in range(4)
        ),
        ethernet("ens32", "10.4.0.1/20", 100),
    ],
    "one_port_as_two_nics": [
        rdma("enp1s0f0np0", "roce_v2", "10.3.0.1/24", 100),
        rdma("enP2p1s0f0np0", "roce_v2", "10.3.1.1/24", 100),
        ethernet("e0", "10.0.0.1/24", 10),
    ],
}

# Machine: the NIC of sockets without rails, all rails, and what NCCL gets. None: the hosts share nothing.
ANSWERS = {
    "cloud_ethernet": ("eth0", ["eth0"], ("Socket", [])),
    "infiniband8": (
        "ib0",
        [f"ib{i}" for i in range(8)],
        ("IB", [f"mlx5_{i}:1" for i in (0, 3, 4, 5, 6, 9, 10, 11)]),
    ),
    "infiniband_and_roce": ("ibp1s0", ["ibp1s0"], ("IB", ["ibp1s0:1", "ibp65s0:1"])),
    "laptop": ("wlp0s20f3", ["wlp0s20f3"], ("Socket", [])),
    "loopback_only": None,
    "roce_bond_vlan": ("bond0", ["bond0"], ("IB", ["mlx5_bond_0:1"])),
    "roce25_beside_ethernet100": ("e0", ["e0"], ("Socket", [])),
    "roce100_beside_ethernet100": ("r0", ["r0"], ("IB", ["mlx5_r0:1"])),
    # One rail of 25 is less than 100, four together are as much, and then RDMA comes first.
    "four_roce25_beside_ethernet100": ("e0", [f"r{i}" for i in range(4)], ("IB", [f"mlx5_r{i}:1" for i in range(4)])),
    "infiniband_without_interface": ("e0", ["e0"], ("IB", ["mlx5_bare:1"])),
    "nic_without_address": ("e0", ["e0"], ("Socket", [])),
    "eight_infiniband_without_addresses": ("e0", ["e0"], ("IB", [f"mlx5_{i}:1" for i in range(8)])),
    "eight_routed_roce": ("e0", ["e0"], ("IB", [f"mlx5_r{i}:1" for i in range(8)])),
    "one_port_as_two_nics": (
        "enp1s0f0np0",
        ["enp1s0f0np0", "enP2p1s0f0np0"],
        ("IB", ["mlx5_enP2p1s0f0np0:1", "mlx5_enp1s0f0np0:1"]),
    ),
}


def machine(name, host):
    """The machine as host number `host`: its addresses are so much further on."""
    found = BESIDE.get(name)
    found = {"interfaces": found} if found else yaml.safe_load((FIXTURES / f"{name}.yaml").read_text())

    def moved(text):
        address = ipaddress.ip_interface(text)
        return f"{address.ip + 100 * host}/{address.network.prefixlen}"

    interfaces = [
        {**one, "addresses": [moved(text) for text in one.get("addresses", [])]} for one in found["interfaces"]
    ]
    return {**found, "interfaces": interfaces}


@pytest.fixture
def roots(tmp_path, monkeypatch):
    """Writes a machine as every host's; ranks are threads, each on a host of its own."""
    monkeypatch.setattr(nic_agreement, "host_identity", lambda: threading.current_thread().name)
    monkeypatch.delenv("HOLMES_NICS", raising=False)
    return lambda name: [str(write_sysfs(tmp_path / str(host), machine(name, host))) for host in range(HOSTS)]


def on_all(call):
    """What `call(rank)` gives on every rank, or the error."""

    def one(rank):
        threading.current_thread().name = f"host{rank}"
        try:
            return call(rank)
        except NicError as error:
            return error

    with ThreadPoolExecutor(HOSTS) as pool:
        return list(pool.map(one, range(HOSTS)))


def planned(roots):
    """The NICs of each host in the group that a plan makes of all hosts."""
    nodes = [
        NodeInventory(rank, f"h{rank}", f"h{rank}", usable_ports([nic.to_dict() for nic in discover_nics(root)]))
        for rank, root in enumerate(roots)
    ]
    hosts = merge_hosts(nodes)
    topology = make_topology(hosts, candidate_fabrics(hosts))
    reach = Reach.of_topology(topology)
    if len(topology.clusters) > 1:
        return [[]] * HOSTS
    shared = reach.shared_in_cluster(0)
    names = [list(reach.nics(shared, host)) for host in range(HOSTS)]
    assert names[0] == [fabric.ports["h0"] for fabric in topology.rails(range(HOSTS))]
    return names


def test_the_table_has_every_fixture():
    assert {path.stem for path in FIXTURES.glob("*.yaml")} - {"expected"} == set(ANSWERS) - set(BESIDE)


def default(places, rails):
    """The NICs of each host in a group that nobody says more of than how many rails it has."""
    store = LocalStore()
    options = {"timeout_s": 10, "key_prefix": "test", "max_rails": rails}
    agreed = on_all(lambda rank: agree_nics(store, rank, HOSTS, NicSelection(), sysfs_root=places[rank], **options))
    return [one if isinstance(one, NicError) else [nic.name for nic in one[0]] for one in agreed]


def cpp(places, carrier):
    """What the engine's own agreement gives each host: NICs and HCA ports."""
    store = LocalStore()

    def one(rank):
        offer = NicSelection().offer(discover_nics(places[rank]), carrier, f"host{rank}", f"host{rank}")
        sockets, ports, _, _ = _C.agree_nics(store, rank, HOSTS, offer, "test", 10, carrier)
        return [nic for nic, _ in sockets], sorted(ports)

    return on_all(one)


def nccl_agreements(places):
    store = LocalStore()
    options = {"timeout_s": 10, "key_prefix": "test"}
    return on_all(lambda rank: agree_nccl(store, rank, HOSTS, NicSelection(), sysfs_root=places[rank], **options))


def nccl(places):
    """What NCCL gets on each host: transport, HCA ports, interfaces."""
    agreed = nccl_agreements(places)
    profiles = [one if isinstance(one, NicError) else one.profile for one in agreed]
    return [one if isinstance(one, NicError) else (one.net, sorted(one.hcas), one.interfaces) for one in profiles]


@pytest.mark.parametrize("name", [name for name, answer in ANSWERS.items() if answer])
def test_one_answer(name, roots):
    single, rails, (net, ports) = ANSWERS[name]
    places = roots(name)
    assert planned(places) == default(places, len(rails)) == [rails] * HOSTS
    assert default(places, None) == default(places, 1) == [[single]] * HOSTS
    assert cpp(places, "tcp") == [([single], [])] * HOSTS
    for found, (interfaces, same_ports) in zip(nccl(places), cpp(places, "nccl"), strict=True):
        assert found == (net, sorted(ports), interfaces)
        assert same_ports == sorted(ports)
        assert net == "IB" or interfaces == [single]


def automatic(places, selections=(None, None), **objections):
    """What transport "auto" gives each host: NICs of TCP, HCA ports, reason. `objections`: of rank0 or rank1."""
    store = LocalStore()

    def one(rank):
        agreement = nic_agreement.agree_group(
            store,
            rank,
            HOSTS,
            selections[rank] or NicSelection(),
            timeout_s=10,
            key_prefix="test",
            sysfs_root=places[rank],
            carrier="auto",
            no_rdma=objections.get(f"rank{rank}", ""),
        )
        return [nic.name for nic in agreement.nics], [port.port_name for port in agreement.ports], agreement.reason

    return on_all(one)


# Where "auto" takes RDMA, and over which ports. Elsewhere it is TCP.
PORTS = {
    "infiniband8": ["mlx5_0:1"],
    "infiniband_and_roce": ["ibp1s0:1"],
    "roce_bond_vlan": ["mlx5_bond_0:1"],
    "roce100_beside_ethernet100": ["mlx5_r0:1"],
    "infiniband_without_interface": ["mlx5_bare:1"],
    "eight_infiniband_without_addresses": ["mlx5_0:1"],
    "eight_routed_roce": ["mlx5_r0:1"],
    "one_port_as_two_nics": ["mlx5_enp1s0f0np0:1"],
}


@pytest.mark.parametrize("name", [name for name, answer in ANSWERS.items() if answer])
def test_auto_takes_the_ports_that_all_share_and_the_nics_of_tcp(name, roots):
    single = ANSWERS[name][0]
    for nics, ports, reason in automatic(roots(name)):
        assert (nics, ports) == ([single], PORTS.get(name, []))
        assert ("; RDMA over " in reason) == (name in PORTS)
        assert ("RDMA" in reason) == ("roce" in name or name in PORTS)


def test_auto_says_which_rank_keeps_the_group_from_rdma(roots, tmp_path):
    places = roots("roce100_beside_ethernet100")
    ethernet_only = str(write_sysfs(tmp_path / "e", {"interfaces": [ethernet("e0", "10.1.0.200/24", 100)]}))
    for places_of, why, given in (
        ([places[0], ethernet_only], "rank 1 (host {host}) has no active RDMA port that it may use", {}),
        (places, "rank 1 (host {host}): asks for tls='all'", {"rank1": "asks for tls='all'"}),
        (places, "rank 0 (host {host}): has HOLMES_TRANSPORT=tcp", {"rank0": "has HOLMES_TRANSPORT=tcp"}),
        (places, "rank 0 (host {host}) has no active", {"selections": (NicSelection(names=("e0",)), None)}),
        (places, "streams=2 is asked for", {"selections": (NicSelection(streams=2), NicSelection(streams=3))}),
    ):
        found = automatic(places_of, **given)
        expected = "; not RDMA: " + why.format(host=_C.host_name())
        assert [ports for _, ports, _ in found] == [[], []]
        assert all(expected in reason for _, _, reason in found), found


def test_auto_takes_several_ports_where_rails_are_asked_for(roots):
    wanted = (NicSelection(max_rails=4), NicSelection(max_rails=4))
    for nics, ports, _ in automatic(roots("four_roce25_beside_ethernet100"), wanted):
        assert (nics, ports) == ([f"r{i}" for i in range(4)], [f"mlx5_r{i}:1" for i in range(4)])


def test_auto_says_that_sockets_are_faster(roots):
    for _, _, reason in automatic(roots("roce25_beside_ethernet100")):
        assert reason.endswith("; not RDMA: sockets are faster here")


def test_ranks_of_one_host_have_nothing_to_choose(roots, monkeypatch):
    monkeypatch.setattr(nic_agreement, "host_identity", lambda: "one")
    for nics, ports, reason in automatic(roots("infiniband8")):
        assert (nics, ports) == (["lo"], [])
        assert "RDMA" not in reason


# What the sentence of a group says of them: how many ports, of which kind, and why they and no others.
SENTENCES = {
    "eight_infiniband_without_addresses": [
        "infiniband fe80::/64 at 400 Gbit/s: the fastest",
        "infiniband, 8 ports of each rank",
    ],
    "eight_routed_roce": ["routed roce", "at 400 Gbit/s: the fastest", "roce, 8 ports of each rank"],
    "one_port_as_two_nics": ["roce 10.3.0.0/24, 10.3.1.0/24 at 100 Gbit/s", "roce, 2 ports of each rank"],
    "infiniband8": ["infiniband, 8 ports of each rank"],
    "infiniband_without_interface": ["infiniband fe80::/64 at 400 Gbit/s", "infiniband, 1 port of each rank"],
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_sentence_says_why_nccl_has_these_ports(name, roots):
    for agreement in nccl_agreements(roots(name)):
        for words in SENTENCES[name]:
            assert words in agreement.reason, (words, agreement.reason)


def test_an_efa_is_left_to_the_sites_plugin(roots):
    """It is listed with the HCAs, and NCCL itself cannot use it; sockets go over the Ethernet NIC beside it."""
    places = roots("efa")
    assert default(places, None) == [["ens32"]] * HOSTS
    for agreement in nccl_agreements(places):
        assert (agreement.profile.net, agreement.profile.hcas) == ("Site", [])
        assert agreement.profile.interfaces == ["ens32"]
        assert "rdmap16s27 is an EFA" in agreement.reason


def test_nothing_is_shared_by_any_rule(roots):
    places = roots("loopback_only")
    assert planned(places) == [[]] * HOSTS
    for found in (default(places, None), cpp(places, "tcp"), nccl(places), cpp(places, "nccl")):
        assert all(isinstance(one, NicError) for one in found)


def test_measured_rates_count_and_a_fabrics_noise_does_not():
    """A plan's rates are measured ones where there are any; those within a quarter of the best are equal."""

    def best(**rates):
        networks = [
            _C.SharedNetwork(name, False, True, rate, 0, 2, [i]) for i, (name, rate) in enumerate(rates.items())
        ]
        return list(rates)[_C.best_first(networks)[0][0]]

    assert best(ethernet=94.0, roce_v2=100.0) == best(ethernet=100.0, roce_v2=76.0) == "roce_v2"
    assert best(ethernet=100.0, roce_v2=74.0) == "ethernet"
    assert best(ethernet=1.0, infiniband=None) == "ethernet"
    assert best(roce_v2=None, infiniband=None) == "infiniband"


def test_a_vlan_is_no_rail_beside_its_parent_in_files_either(tmp_path):
    ports = (
        Port("bond0", "roce_v2", "", "a", 200.0),
        Port("bond0.100", "roce_v2", "", "b", 200.0, parent="bond0"),
        Port("bond1", "roce_v2", "", "c", 200.0),
    )
    hosts = [Host(f"h{i}", f"h{i}", (i,), ports) for i in range(2)]
    make_topology(hosts, candidate_fabrics(hosts)).save(tmp_path / "topology.yaml")
    topology = Topology.load(tmp_path / "topology.yaml")
    assert topology.hosts == tuple(hosts)
    plan_for(topology, model_layers=4).save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml").group_of("dp", 0).nics[1] == ("bond0", "bond1")
