"""agree_nccl with ranks as threads, each on a machine of its own: transport, NICs, and errors on every rank."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_nic_agreement import TIMEOUT_S, MemoryStore, nic, two_clusters

from holmes.lab.fake_sysfs import write_sysfs
from holmes_comm import nic_agreement
from holmes_comm.errors import NicError
from holmes_comm.nccl_agreement import agree_nccl
from holmes_comm.nics import NicSelection


@pytest.fixture
def agree(tmp_path, monkeypatch):
    monkeypatch.setattr(nic_agreement, "host_name", lambda: threading.current_thread().name)
    monkeypatch.setattr(nic_agreement, "host_identity", lambda: threading.current_thread().name)

    def run(size, machines, selection=None, **more):
        store = MemoryStore()

        def one(rank):
            threading.current_thread().name = f"node{rank}"
            root = write_sysfs(tmp_path / str(rank), {"interfaces": machines(rank)})
            options = {"timeout_s": TIMEOUT_S, "key_prefix": "test", "sysfs_root": root, **more}
            try:
                return agree_nccl(store, rank, size, selection or NicSelection(), **options)
            except NicError as error:
                return error

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(one, range(size)))

    return run


def test_one_cluster_uses_its_hcas(agree):
    for agreement in agree(2, two_clusters):
        assert agreement.profile.net == "IB"
        assert agreement.profile.hcas == ["mlx5_ib0:1"]
        assert agreement.profile.interfaces == ["ib0"]
        assert "infiniband" in agreement.reason


def test_roce_gives_its_gid_index(agree):
    agreements = agree(2, lambda rank: [nic("e2", "roce", f"10.2.0.{rank}/24", 200)])
    assert [agreement.profile.net for agreement in agreements] == ["IB", "IB"]
    assert all("GID" in repr(agreement.profile) for agreement in agreements)


def test_the_plugin_is_for_what_has_no_rdma(agree, monkeypatch):
    monkeypatch.setenv("NCCL_NET_PLUGIN", "holmes")
    assert [agreement.profile.net for agreement in agree(2, two_clusters, net="holmes")] == ["IB"] * 2
    assert [agreement.profile.net for agreement in agree(4, two_clusters, net="holmes")] == ["holmes"] * 4
    named = NicSelection(nic_class="ethernet")
    assert [agreement.profile.net for agreement in agree(4, two_clusters, named, net="holmes")] == ["holmes"] * 4
    assert [agreement.profile.net for agreement in agree(4, two_clusters, named)] == ["Socket"] * 4
    assert [agreement.profile.net for agreement in agree(4, two_clusters)] == ["Site"] * 4


def test_over_clusters_all_use_sockets(agree):
    agreements = agree(4, two_clusters)
    assert [agreement.profile.net for agreement in agreements] == ["Socket"] * 4
    assert [agreement.profile.interfaces for agreement in agreements] == [[f"eth{rank}"] for rank in range(4)]
    assert all(agreement.profile.hcas == [] for agreement in agreements)


def test_roce_here_and_plain_ethernet_there_is_sockets(agree):
    def machines(rank):
        return [nic("e2", "roce" if rank == 0 else "ethernet", f"10.2.0.{rank}/24", 100)]

    agreements = agree(2, machines)
    assert [agreement.profile.net for agreement in agreements] == ["Socket", "Socket"]
    assert "not all ranks" in agreements[1].reason


def test_rdma_that_is_asked_for_and_missing_fails_on_every_rank(agree):
    def machines(rank):
        return [nic("e2", "roce" if rank == 0 else "ethernet", f"10.2.0.{rank}/24", 100)]

    for error in agree(2, machines, NicSelection(nic_class="roce")):
        assert isinstance(error, NicError)
        assert "node1" in str(error)


def test_port_without_interface_shakes_hands_over_ethernet(agree):
    def machines(rank):
        return [
            {"name": "", "nic_class": "infiniband", "hca": "mlx5_7", "speed_gbps": 400},
            nic("eth0", "ethernet", f"10.0.0.{rank}/16", 25),
        ]

    for agreement in agree(2, machines, NicSelection(nic_class="infiniband")):
        assert agreement.profile.net == "IB"
        assert agreement.profile.hcas == ["mlx5_7:1"]
        assert agreement.profile.interfaces == ["eth0"]


def test_rails(agree):
    def machines(rank):
        return [nic(f"e{rail}", "roce", f"10.{rail}.0.{rank}/24", 100) for rail in (1, 2)]

    for agreement in agree(2, machines, NicSelection(nic_class="roce", max_rails=2)):
        assert sorted(agreement.profile.hcas) == ["mlx5_e1:1", "mlx5_e2:1"]
        assert sorted(agreement.profile.interfaces) == ["e1", "e2"]
