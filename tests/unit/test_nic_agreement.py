"""agree_nics with ranks as threads, each on a machine of its own: what is chosen, why, and errors on every rank."""

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from holmes.lab.fake_sysfs import write_sysfs
from holmes_comm import nic_agreement
from holmes_comm.errors import NicError, SystemError, TimeoutError
from holmes_comm.nics import NicSelection, agree_nics

TIMEOUT_S = 10.0


class MemoryStore:
    """The three methods that agree_nics needs."""

    def __init__(self):
        self._values = {}
        self._changed = threading.Condition()

    def set(self, key, value):
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key):
        return self._values[key]

    def wait(self, keys, timeout):
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout.total_seconds()):
                raise RuntimeError(f"waited in vain for {keys}")


def nic(name, nic_class, address, speed_gbps, **more):
    hca = {"hca": f"mlx5_{name}"} if nic_class != "ethernet" else {}
    addresses = [address] if address else []
    return {"name": name, "nic_class": nic_class, "addresses": addresses, "speed_gbps": speed_gbps, **hca, **more}


def two_clusters(rank):
    """Ranks 0, 1: InfiniBand; ranks 2, 3: RoCE; a slower Ethernet joins all."""
    fast = (
        nic("ib0", "infiniband", f"10.1.0.{rank}/24", 400) if rank < 2 else nic("e2", "roce", f"10.2.0.{rank}/24", 200)
    )
    return [fast, nic(f"eth{rank}", "ethernet", f"10.0.0.{rank}/16", 25)]


@pytest.fixture
def agree(tmp_path, monkeypatch):
    """Runs agree_nics on every rank; machines(rank) lists its interfaces, one_host puts all ranks on rank 0's."""
    monkeypatch.setattr(nic_agreement, "host_name", lambda: threading.current_thread().name)
    monkeypatch.setattr(nic_agreement, "host_identity", lambda: threading.current_thread().name)

    def run(size, machines, selections=None, *, one_host=False, ranks=None, store=None, **options):
        store = store or MemoryStore()
        options = {"timeout_s": TIMEOUT_S, "key_prefix": "test", **options}

        def one(rank):
            threading.current_thread().name = "node0" if one_host else f"node{rank}"
            root = write_sysfs(tmp_path / str(rank), {"interfaces": machines(rank)})
            selection = selections(rank) if selections else NicSelection()
            try:
                return agree_nics(store, rank, size, selection, sysfs_root=root, **options)
            except Exception as error:
                return error

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(one, range(size) if ranks is None else ranks))

    return run


def names(results):
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [[nic.name for nic in nics] for nics, _ in results]


def test_all_ranks_take_the_network_that_joins_them(agree):
    results = agree(4, two_clusters)
    assert names(results) == [["eth0"], ["eth1"], ["eth2"], ["eth3"]]
    assert [nics[0].address for nics, _ in results] == [f"10.0.0.{rank}" for rank in range(4)]
    assert {reason for _, reason in results} == {
        "ethernet 10.0.0.0/16 at 25 Gbit/s: the fastest network that all 4 ranks share"
    }


def test_a_cluster_takes_its_own_fast_network(agree):
    results = agree(2, two_clusters)
    assert names(results) == [["ib0"], ["ib0"]]
    assert results[0][1].startswith("infiniband 10.1.0.0/24 at 400 Gbit/s")
    assert results[0][1].endswith("not ethernet 10.0.0.0/16")


def test_the_slowest_member_counts(agree):
    def machines(rank):
        return [
            nic("eth1", "ethernet", f"10.1.0.{rank}/24", 100 if rank else 1),
            nic("eth2", "ethernet", f"10.2.0.{rank}/24", 10),
        ]

    assert names(agree(2, machines)) == [["eth2"], ["eth2"]]


@pytest.mark.parametrize("classes", [("infiniband", "roce"), ("roce", "ethernet")])
def test_equal_speed_is_decided_by_class(agree, classes):
    better, worse = classes
    # The worse one would win by name and by subnet.
    machine = lambda rank: [nic("a0", worse, f"10.1.0.{rank}/24", 100), nic("b0", better, f"10.2.0.{rank}/24", 100)]  # noqa: E731
    assert names(agree(3, machine)) == [["b0"]] * 3


def test_roce_and_plain_ethernet_of_one_subnet_are_ethernet(agree):
    results = agree(2, lambda rank: [nic("eth0", "roce" if rank else "ethernet", f"10.0.0.{rank}/24", 25)])
    assert names(results) == [["eth0"], ["eth0"]]
    assert results[0][1].startswith("ethernet 10.0.0.0/24")


def test_one_subnet_on_infiniband_and_on_ethernet_is_not_shared(agree):
    results = agree(2, lambda rank: [nic("x0", "infiniband" if rank else "ethernet", f"10.0.0.{rank}/24", 25)])
    assert all(isinstance(result, NicError) for result in results)
    assert "infiniband 10.0.0.0/24: rank 1" in str(results[0])


def test_bridges_with_one_address_on_every_host_are_not_shared(agree):
    def machines(rank):
        docker = nic("docker0", "ethernet", "172.17.0.1/16", 1000, kind="bridge")
        return [docker, nic("eth0", "ethernet", f"10.0.0.{rank}/24", None)]

    assert names(agree(2, machines)) == [["eth0"], ["eth0"]]


@pytest.mark.parametrize("gateway", [True, False])
def test_without_a_shared_network_ethernet_must_be_routed(agree, gateway):
    def machines(rank):
        fast = nic("ib0", "infiniband", f"10.1.{rank}.1/24", 400)
        return [fast, nic(f"eth{rank}", "ethernet", f"10.0.{rank}.1/24", 25, gateway=gateway)]

    results = agree(2, machines)
    if gateway:
        assert names(results) == [["eth0"], ["eth1"]]
        assert results[0][1].startswith("routed Ethernet: the 2 ranks share no network")
    else:
        assert all(isinstance(result, NicError) for result in results)
        assert "ethernet 10.0.1.0/24: rank 1" in str(results[0])


def test_a_rank_without_a_usable_nic_is_named(agree):
    machines = lambda rank: [nic("eth0", "ethernet", f"10.0.0.{rank}/24", 25, state="down" if rank == 2 else "up")]  # noqa: E731
    results = agree(3, machines)
    assert all(isinstance(result, NicError) for result in results)
    assert {str(result) for result in results} == {str(results[0])}
    assert "rank 2 on host node2" in str(results[0])
    assert "eth0 (ethernet, down" in str(results[0])


def test_names_may_differ_per_node(agree):
    results = agree(4, two_clusters, lambda _: NicSelection(("eth[01]", "eth2", "eth3")))
    assert names(results) == [["eth0"], ["eth1"], ["eth2"], ["eth3"]]


def test_class_is_obeyed_although_another_is_faster(agree):
    assert names(agree(2, two_clusters, lambda _: NicSelection(nic_class="ethernet"))) == [["eth0"], ["eth1"]]


def test_subnet_is_obeyed(agree):
    results = agree(2, two_clusters, lambda _: NicSelection(subnet="10.0.0.0/16"))
    assert names(results) == [["eth0"], ["eth1"]]


def test_a_wrong_name_on_one_rank_is_raised_on_every_rank(agree):
    results = agree(4, two_clusters, lambda rank: NicSelection(("eth9" if rank == 2 else "eth*",)))
    for rank, error in enumerate(results):
        assert isinstance(error, NicError)
        assert "rank 2 on host node2: no NIC is called 'eth9'" in str(error)
        assert "eth2 (ethernet, up, 10.0.0.2/16)" in str(error)
        assert (error.rank, error.peer) == (rank, None if rank == 2 else 2)
        assert (error.host, error.nic) == ("node2", "eth9")


def test_one_host_needs_no_nic(agree):
    results = agree(3, lambda _: [nic("eth0", "ethernet", "10.0.0.1/24", 25)], one_host=True)
    assert names(results) == [["lo"]] * 3
    assert results[0][1] == "loopback: all 3 ranks are on one host"


def test_one_host_without_any_network_still_agrees(agree):
    down = [{"name": "lo", "nic_class": "loopback", "kind": "loopback", "state": "down"}]
    results = agree(2, lambda _: down, one_host=True)
    assert names(results) == [[], []]
    assert results[0][1].startswith("no NIC needed")


def test_one_host_uses_the_nic_that_is_asked_for(agree):
    machine = [nic("eth0", "ethernet", "10.0.0.1/24", 25)]
    assert names(agree(2, lambda _: machine, lambda _: NicSelection(("eth0",)), one_host=True)) == [["eth0"]] * 2
    assert names(agree(2, lambda _: machine, lambda _: NicSelection(("lo",)), one_host=True)) == [["lo"]] * 2


def test_loopback_joins_no_hosts(agree):
    results = agree(2, lambda _: [], lambda _: NicSelection(("lo",)))
    assert all(isinstance(result, NicError) for result in results)


def test_rails_are_in_one_order_on_all_ranks(agree):
    def machines(rank):  # interface names count in opposite directions on the two nodes
        rails = [nic(f"ib{3 - i if rank else i}", "infiniband", f"10.{i + 1}.0.{rank}/24", 400) for i in range(4)]
        return [*rails, nic("eth0", "ethernet", f"10.0.0.{rank}/24", 400)]

    results = agree(2, machines, max_rails=3)
    assert names(results) == [["ib0", "ib1", "ib2"], ["ib3", "ib2", "ib1"]]
    assert [[nic.address for nic in nics] for nics, _ in results] == [
        [f"10.{i}.0.{rank}" for i in (1, 2, 3)] for rank in (0, 1)
    ]


def test_rails_of_one_subnet(agree):
    machines = lambda rank: [nic(f"ib{i}", "infiniband", f"10.1.{rank}.{i}/16", 400) for i in range(3 - rank)]  # noqa: E731
    assert names(agree(2, machines, max_rails=8)) == [["ib0", "ib1"]] * 2


def test_a_vlan_and_its_parent_are_one_rail(agree):
    def machines(rank):
        vlan = {"name": "eth0.5", "kind": "vlan", "parent": "eth0", "vlan_id": 5, "speed_gbps": 25}
        return [nic("eth0", "ethernet", f"10.9.0.{rank}/24", 25), {**vlan, "addresses": [f"10.1.0.{rank}/24"]}]

    assert names(agree(2, machines, max_rails=8)) == [["eth0"], ["eth0"]]


def test_both_address_families_of_a_nic_are_one_rail(agree):
    def machines(rank):
        return [nic("eth0", "ethernet", "", 25) | {"addresses": [f"fd00::{rank + 1}/64", f"10.1.0.{rank}/24"]}]

    results = agree(2, machines, max_rails=8)
    assert names(results) == [["eth0"], ["eth0"]]
    assert results[1][0][0].address == "10.1.0.1"


def test_environment_is_used_without_a_selection(agree, monkeypatch):
    monkeypatch.setenv("HOLMES_NICS", "class:ethernet")
    assert names(agree(2, two_clusters, lambda _: None)) == [["eth0"], ["eth1"]]


@pytest.mark.parametrize("absent", [0, 1])
def test_an_absent_rank_is_named_on_every_other(agree, absent):
    present = [rank for rank in range(3) if rank != absent]
    start = time.monotonic()
    results = agree(3, two_clusters, ranks=present, timeout_s=0.3)
    assert time.monotonic() - start < TIMEOUT_S / 2
    for error in results:
        assert isinstance(error, TimeoutError)
        assert f"rank {absent} of 3 did not take part" in str(error)
        assert error.peer == absent


def test_a_rank_without_descriptors_is_a_system_error_on_all(agree, monkeypatch):
    def check():
        if threading.current_thread().name == "node1":
            raise SystemError("no descriptor is left", system_errno=errno.EMFILE)

    monkeypatch.setattr(nic_agreement, "check_descriptors", check)
    for error in agree(3, two_clusters):
        assert isinstance(error, SystemError)
        assert "rank 1 on host node1: no descriptor is left" in str(error)
        assert error.system_errno == errno.EMFILE


def test_a_torch_store_will_do(agree):
    distributed = pytest.importorskip("torch.distributed")
    assert names(agree(4, two_clusters, store=distributed.HashStore())) == [[f"eth{rank}"] for rank in range(4)]


def test_rails_may_differ_in_speed_and_the_smallest_wish_counts(agree):
    def machines(rank):
        return [
            nic("roce1", "roce_v2", f"10.2.0.{rank + 1}/24", 25),
            nic("roce0", "roce_v2", f"10.1.0.{rank + 1}/24", 100),
            nic("eth0", "ethernet", f"10.0.0.{rank + 1}/24", 10),
        ]

    both = agree(2, machines, lambda _: NicSelection(max_rails=3))
    assert names(both) == [["roce0", "roce1"]] * 2
    assert names(agree(2, machines, lambda rank: NicSelection(max_rails=2 - rank))) == [["roce0"]] * 2
