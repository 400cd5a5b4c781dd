"""`holmes doctor`'s checks with made-up facts: each says nothing where all is well, and names what is wrong."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holmes.cluster.probe import Exchange, Responder
from holmes.cluster.topology import candidate_fabrics, make_topology, merge_hosts
from holmes.cluster.topology.parts import NodeInventory, TopologyFinding
from holmes.planning.plan import plan_for
from holmes.tools.doctor import CHECKS, Clock, Finding, JobFacts, NicFacts, RankFacts, Trial, diagnose, gather_hosts
from holmes.tools.doctor.clock import compare_clocks
from holmes.tools.doctor.collect import collect
from holmes.tools.doctor.facts import ports_of
from holmes.tools.doctor.finding import merged
from holmes.tools.doctor.trials import attempt, known_to_arp, listening_ports
from holmes_comm import LocalStore

V2_GID = {"index": 3, "gid": "0000:0000:0000:0000:0000:ffff:0a00:0001", "type": "RoCE v2"}
V1_GID = {"index": 2, "gid": "0000:0000:0000:0000:0000:ffff:0a00:0001", "type": "IB/RoCE v1"}


def nic(name: str, address: str, nic_class: str = "ethernet", **changes: Any) -> NicFacts:
    settings = {"mtu": 1500, "speed_gbps": 10.0, "rp_filter": 2, "arp_filter": 0, "arp_ignore": 1}
    return NicFacts(name, nic_class, address=address, **{**settings, **changes})


def rank(number: int, *, nics: tuple[NicFacts, ...] | None = None, **changes: Any) -> RankFacts:
    own = (nic("eth0", f"10.0.0.{number + 1}/24"), nic("ib0", f"10.1.0.{number + 1}/24", "infiniband", mtu=4092))
    name = f"h{number}"
    facts = RankFacts(
        rank=number,
        host=name,
        host_id=name,
        nics=own if nics is None else nics,
        hostname_addresses=(f"10.0.0.{number + 1}",),
        open_files_limit=1024,
        open_files=10,
        shm_free_bytes=1 << 30,
        tcp_read_max_bytes=6 << 20,
        tcp_write_max_bytes=4 << 20,
        congestion_control="cubic",
        nccl_version="2.27.7",
        holmes_version="0.1.0",
        torch_version="2.13.0",
    )
    return dataclasses.replace(facts, **changes)


def job(*ranks: RankFacts, found: tuple[TopologyFinding, ...] = (), **facts: Any) -> JobFacts:
    hosts = merge_hosts([NodeInventory(r.rank, r.host, r.host_id, ports_of(r)) for r in ranks])
    return JobFacts(ranks, gather_hosts(ranks), make_topology(hosts, candidate_fabrics(hosts), found), **facts)


def trial(outcome: str = "ok", **changes: Any) -> Trial:
    place = ("h0", "eth0", "h1", "eth0", "10.0.0.0/24", "10.0.0.2", 4000)
    usual = Trial(*place, outcome, round_trip_s=1e-4 if outcome == "ok" else None)
    return dataclasses.replace(usual, **changes)


def findings(facts: JobFacts) -> list[Finding]:
    return list(diagnose(facts).findings)


def the_one(facts: JobFacts) -> Finding:
    found = findings(facts)
    assert len(found) == 1, found
    return found[0]


def test_a_sound_job_is_all_good() -> None:
    clocks = [Clock("h1", 0.4, 0.001)]
    facts = job(rank(0), rank(1), rank(2), trials=[trial()], clocks=clocks)
    diagnosis = diagnose(facts)
    assert diagnosis.findings == ()
    assert diagnosis.exit_code == 0
    assert diagnosis.checked == tuple(name for name in CHECKS if name != "the plan's groups")  # no plan given
    assert diagnosis.clusters == ("cluster 0: h0, h1, h2 (infiniband)",)


def test_alone_only_what_needs_one_host_is_checked() -> None:
    diagnosis = diagnose(job(rank(0)))
    assert {"MTU", "clocks", "connections and firewalls"} <= set(diagnosis.skipped)
    assert set(diagnosis.checked) | set(diagnosis.skipped) == set(CHECKS) - {"the plan's groups"}


ETH = nic("eth0", "10.0.0.2/24")
LO_DOWN = nic("lo", "", "loopback", kind="loopback", is_up=False, is_netdev_up=False, state="down")
IB = nic("ib0", "10.1.0.2/24", "infiniband", mtu=4092)
ROCE = {"nic_class": "roce_v2", "gid_index": 3, "gids": (V1_GID, V2_GID)}


@pytest.mark.parametrize(
    ("second", "severity", "check", "interface", "says", "fix"),
    [
        ({"nics": (ETH,)}, "warning", "nic class", "", "no usable RDMA NIC", "holmes nics"),
        (
            {"nics": (ETH, dataclasses.replace(IB, is_up=False, is_netdev_up=False, state="down"))},
            "warning",
            "rdma port",
            "ib0",
            "'down', not active",
            "ibstat",
        ),
        ({"nics": (ETH, dataclasses.replace(IB, mtu=2044))}, "warning", "mtu", "ib0", "MTU 2044", "mtu 4092"),
        ({"hostname_addresses": ("127.0.1.1",)}, "error", "host name", "", "resolves to 127.0.1.1", "/etc/hosts"),
        ({"nics": (ETH, IB, LO_DOWN)}, "error", "loopback", "lo", "is down", "ip link set lo up"),
        ({"hostname_addresses": ()}, "warning", "host name", "", "no address", "/etc/hosts"),
        ({"hostname_addresses": ("192.0.2.9",)}, "warning", "host name", "", "no address of its NICs", "/etc/hosts"),
        ({"memlock_limit_bytes": 64 << 10}, "error", "locked memory", "", "0.0625 MiB", "memlock unlimited"),
        ({"open_files_limit": 12}, "error", "descriptors", "", "12 descriptors", "ulimit -Hn 64"),
        ({"open_files_limit": 20}, "warning", "descriptors", "", "20 descriptors", "ulimit -Hn 64"),
        ({"memfd_error": "not permitted"}, "note", "shared memory", "", "memfd_create does not work", "HOLMES_SHM=0"),
        ({"shm_free_bytes": 1 << 20}, "warning", "shared memory", "", "1 MiB free", "--shm-size"),
        ({"shm_free_bytes": None}, "warning", "shared memory", "", "cannot be written", "--shm-size"),
        ({"selection_error": "no NIC is called 'x'"}, "error", "nic selection", "", "no NIC is called", "HOLMES_NICS"),
        ({"variables_error": "HOLMES_TLS='ja' is not allowed"}, "error", "variable", "", "HOLMES_TLS='ja'", "unset it"),
        ({"variables": {"HOLMES_NCIS": "x"}}, "warning", "variable", "", "no such variable", "write HOLMES_NICS"),
        ({"variables": {"NCCL_IB_DISABLE": "0"}}, "error", "variable", "", "is unset on", ""),
        ({"variables": {"HOLMES_SHM": "0"}}, "note", "variable", "", "HOLMES_SHM=0", ""),
        ({"variables": {"NCCL_FOO": "1"}}, "note", "variable", "", "a setting of NCCL", ""),
        ({"nccl_version": "2.21.5"}, "error", "version", "", "NCCL 2.21.5", "install one NCCL"),
        ({"nccl_version": None}, "error", "version", "", "no NCCL", "install one NCCL"),
    ],
)
def test_each_check_names_the_host_that_is_wrong(
    second: dict[str, Any], severity: str, check: str, interface: str, says: str, fix: str
) -> None:
    others = [rank(0), rank(2)]
    found = findings(job(others[0], rank(1, **second), others[1]))
    named = [f for f in found if (f.severity, f.check, f.nic) == (severity, check, interface)]
    assert len(named) == 1, found
    assert named[0].host == "h1"
    assert says in named[0].problem
    assert fix in named[0].fix


def test_a_host_that_reaches_nobody_is_named_itself() -> None:
    silent = [trial("silent", has_arp=False), trial("silent", has_arp=False, target="h2", address="10.0.0.3")]
    found = the_one(job(rank(0), rank(1), rank(2), trials=[*silent, trial(source="h2")]))
    assert (found.severity, found.check, found.host, found.nic) == ("warning", "unreachable", "h0", "eth0")
    assert "reaches none of h1 eth0, h2 eth0" in found.problem


def test_fewer_nics_than_others_of_the_cluster() -> None:
    second = tuple(nic("ib1", f"10.3.0.{n + 1}/24", "infiniband", mtu=4092) for n in range(3))
    both = [dataclasses.replace(rank(n), nics=(*rank(n).nics, second[n])) for n in range(3)]
    assert findings(job(*both)) == []
    found = the_one(job(both[0], rank(1), both[2]))
    assert (found.severity, found.check, found.host) == ("warning", "nic class", "h1")
    assert "1 usable NICs of class infiniband, where other hosts of cluster 0 have 2" in found.problem


def test_duplicate_addresses_but_not_those_of_container_bridges() -> None:
    bridge = nic("docker0", "172.17.0.1/16", kind="bridge")
    assert findings(job(rank(0, nics=(ETH, bridge), hostname_addresses=("10.0.0.2",)))) == []
    facts = job(rank(0, nics=(nic("eth0", "10.0.0.1/24"), bridge)), rank(1, nics=(nic("eth0", "10.0.0.1/24"), bridge)))
    found = [f for f in findings(facts) if f.check == "duplicate address"]
    assert [(f.severity, f.host, f.nic) for f in found] == [("error", "h0", "eth0"), ("error", "h1", "eth0")]
    assert "10.0.0.1 is also that of h1 eth0" in found[0].problem


def test_several_nics_in_one_subnet() -> None:
    first = nic("eth0", "10.0.0.1/24", egress="eth0")
    assert findings(job(rank(0, nics=(first, nic("eth1", "10.0.0.7/24", egress="eth1"))))) == []
    wrong = the_one(job(rank(0, nics=(first, nic("eth1", "10.0.0.7/24", egress="eth0")))))
    assert (wrong.check, wrong.nic) == ("wrong egress", "eth1")
    assert "out of eth0" in wrong.problem
    assert "ip rule add from 10.0.0.7" in wrong.fix
    flux = the_one(job(rank(0, nics=(first, nic("eth1", "10.0.0.7/24", arp_ignore=0)))))
    assert (flux.check, flux.nic) == ("arp", "eth1")
    strict = the_one(job(rank(0, nics=(first, nic("eth1", "10.0.0.7/24", rp_filter=1)))))
    assert (strict.check, strict.nic) == ("rp_filter", "eth1")
    assert findings(job(rank(0, nics=(nic("eth0", "10.0.0.1/24", rp_filter=1),)))) == []  # alone in it: harmless


def test_roce_needs_a_v2_entry_under_one_index() -> None:
    good = [rank(n, nics=(nic("roce0", f"10.0.0.{n + 1}/24", **ROCE),)) for n in range(3)]
    assert findings(job(*good)) == []
    only_v1 = rank(1, nics=(nic("roce0", "10.0.0.2/24", **{**ROCE, "gids": (V1_GID,)}),))
    found = the_one(job(good[0], only_v1, good[2]))
    assert (found.severity, found.check, found.host, found.nic) == ("error", "gid", "h1", "roce0")
    other = rank(1, nics=(nic("roce0", "10.0.0.2/24", **{**ROCE, "gids": ({**V2_GID, "index": 5},)}),))
    found = the_one(job(good[0], other, good[2]))
    assert (found.severity, found.check, found.host) == ("warning", "gid", "h1")
    assert "index 5, and 2 other NICs have 3" in found.problem


def test_gids_of_two_types_in_a_subnet() -> None:
    def with_index(index: str, **variables: str) -> list[Finding]:
        told = {"HOLMES_RDMA_GID_INDEX": index, **variables}
        nics = [(nic("roce0", f"10.0.0.{n + 1}/24", **ROCE),) for n in range(3)]
        ranks = [rank(0, nics=nics[0]), rank(1, nics=nics[1], variables=told), rank(2, nics=nics[2])]
        return [found for found in findings(job(*ranks)) if found.check == "gid"]

    assert with_index("3") == []
    (found,) = with_index("2")
    assert (found.severity, found.host, found.nic) == ("warning", "h1", "roce0")
    assert "its GID 2, of type IB/RoCE v1, and 2 other NICs in 10.0.0.0/24 use RoCE v2" in found.problem
    assert "unset HOLMES_RDMA_GID_INDEX" in found.fix
    (found,) = with_index("2", HOLMES_TRANSPORT="rdma")
    assert found.severity == "error"
    (found,) = with_index("7")
    assert (found.severity, found.host) == ("error", "h1")
    assert "HOLMES_RDMA_GID_INDEX=7 names no GID of it; it has 2 (IB/RoCE v1), 3 (RoCE v2)" in found.problem


def test_an_hca_that_sends_smaller_packets() -> None:
    def with_mtu(*sizes: int | None) -> list[Finding]:
        fabric = (nic("ib0", f"10.1.0.{n + 1}/24", "infiniband", rdma_mtu=size) for n, size in enumerate(sizes))
        found = findings(job(*(rank(n, nics=(one,)) for n, one in enumerate(fabric))))
        return [one for one in found if one.check != "host name"]

    assert with_mtu(4096, 4096) == with_mtu(4096, None) == []
    (found,) = with_mtu(4096, 2048, 4096)
    assert (found.severity, found.check, found.host, found.nic) == ("warning", "mtu", "h1", "ib0")
    assert "its HCA sends 2048 bytes in a packet, and 2 other NICs in 10.1.0.0/24 4096" in found.problem


def test_a_port_without_interface_is_for_verbs_only() -> None:
    port = nic("mlx5_0:1", "", "infiniband", is_netdev_up=False, has_interface=False, state="active")
    ports = (nic("eth0", "10.0.0.1/24"), port)
    found = the_one(job(rank(0, nics=ports)))
    assert (found.severity, found.check, found.nic) == ("note", "rdma port", "mlx5_0:1")
    assert "no network interface" in found.problem
    asked = job(rank(0, nics=ports, variables={"HOLMES_TRANSPORT": "rdma"}))
    assert [found.check for found in findings(asked) if found.check == "rdma port"] == []
    down = the_one(job(rank(0, nics=(ports[0], dataclasses.replace(port, is_up=False, state="init")))))
    assert "'init', not active" in down.problem


def test_a_label_that_groups_other_classes() -> None:
    label = {"variables": {"HOLMES_CLUSTER": "a"}}
    assert [f.severity for f in findings(job(rank(0, **label), rank(1, **label), rank(2, **label)))] == ["note"]
    odd = (nic("eth0", "10.0.0.2/24"), nic("roce0", "10.2.0.2/24", **ROCE))
    found = findings(job(rank(0, **label), rank(1, nics=odd, **label), rank(2, **label)))
    (wrong,) = [f for f in found if f.severity == "error"]
    assert (wrong.check, wrong.host) == ("nic class", "h1")
    assert "HOLMES_CLUSTER=a groups it, of class roce_v2, with h0, h2, of class infiniband" in wrong.problem


@pytest.mark.parametrize(
    ("outcome", "has_arp", "severity", "check", "says"),
    [
        ("refused", None, "error", "firewall", "refuses connections of h0 eth0 to 10.0.0.2 port 4000"),
        ("silent", True, "error", "firewall", "its wire works"),
        ("silent", False, "warning", "unreachable", "whose hardware address nobody tells"),
        ("unroutable", None, "warning", "unreachable", "do not reach"),
        ("other host", None, "error", "duplicate address", "another program or host"),
    ],
)
def test_how_a_connection_failed(outcome: str, has_arp: bool | None, severity: str, check: str, says: str) -> None:
    found = the_one(job(rank(0), rank(1), trials=[trial(outcome, has_arp=has_arp)]))
    assert (found.severity, found.check, found.host, found.nic) == (severity, check, "h1", "eth0")
    assert says in found.problem


def test_a_host_that_reaches_nobody_is_not_held_against_its_neighbours() -> None:
    unreachable = TopologyFinding("unreachable", "h0", "eth0", "reaches none", "check its cable")
    silent = [trial("silent", has_arp=False), trial("silent", has_arp=False, target="h2", address="10.0.0.3")]
    found = the_one(job(rank(0), rank(1), rank(2), trials=silent, found=(unreachable,)))
    assert (found.severity, found.check, found.host) == ("error", "unreachable", "h0")


def test_a_plan_against_the_hosts() -> None:
    ranks = [rank(number) for number in range(4)]
    plan = plan_for(job(*ranks).topology, model_layers=4, pipeline=2)
    assert findings(job(*ranks, plan=plan)) == []
    assert "the plan's groups" in diagnose(job(*ranks, plan=plan)).checked
    without = [dataclasses.replace(r, nics=r.nics[:1]) if r.rank in (1, 2) else r for r in ranks]
    wrong = [f for f in findings(job(*without, plan=plan)) if f.check == "plan"]
    assert {(f.severity, f.host, f.nic) for f in wrong} == {("error", "h1, h2", "ib0")}
    assert "dp" in wrong[0].problem
    roce = dataclasses.replace(ranks[3], nics=(ranks[3].nics[0], dataclasses.replace(ranks[3].nics[1], **ROCE)))
    (other,) = [f for f in findings(job(*ranks[:3], roce, plan=plan)) if f.check == "plan"]
    assert "count on class infiniband, and this NIC is of class roce_v2" in other.problem
    (fewer,) = [f for f in findings(job(*ranks[:3], plan=plan)) if f.check == "plan"]
    assert "for 4 ranks, and the job has 3" in fewer.problem
    swapped = [rank(1, rank=0), rank(0, rank=1), *ranks[2:]]
    moved = [f for f in findings(job(*swapped, plan=plan)) if f.check == "plan"]
    assert [f.problem for f in moved] == [
        "rank 0 runs here, and the plan has it on h0",
        "rank 1 runs here, and the plan has it on h1",
    ]


def test_clocks() -> None:
    found = the_one(job(rank(0), rank(1), clocks=[Clock("h1", -7.0, 0.01)]))
    assert (found.check, found.host) == ("clock", "h1")
    assert "7.0 s behind" in found.problem
    assert findings(job(rank(0), rank(1), clocks=[Clock("h1", 1.5, 0.9)])) == []  # not known well enough


def test_tcp_buffers_against_rate_and_round_trip() -> None:
    fast = nic("eth0", "10.0.0.1/24", speed_gbps=100.0)
    facts = [rank(0, nics=(fast, nic("ib0", "10.1.0.1/24", "infiniband", mtu=4092))), rank(1)]
    assert findings(job(*facts, trials=[trial(round_trip_s=1e-4)])) == []
    found = [f for f in findings(job(*facts, trials=[trial(round_trip_s=1e-3)])) if f.check == "tcp buffers"]
    assert ["tcp_rmem" in f.problem for f in found] == [True, False]
    assert "needs 25000000 for one connection" in found[0].problem
    assert 'net.ipv4.tcp_wmem="4096 131072 16777216"' in found[1].fix


def test_congestion_control_and_unequal_variables() -> None:
    found = findings(job(rank(0), rank(1, congestion_control="reno")))
    assert [(f.check, f.host) for f in found] == [("congestion control", "h0"), ("congestion control", "h1")]
    reno = [rank(number, congestion_control="reno") for number in range(2)]
    assert findings(job(*reno)) == []
    assert "10 ms" in findings(job(*reno, trials=[trial(round_trip_s=0.01)]))[-1].problem
    ranks = [rank(n, variables={"NCCL_ALGO": "Ring" if n else "Tree"}) for n in range(3)]
    (unequal,) = [f for f in findings(job(*ranks)) if f.severity == "error"]
    assert unequal.host == "h0"
    assert "NCCL_ALGO=Tree on rank 0, but NCCL_ALGO=Ring on the 2 others" in unequal.problem


def test_overriding_variables_are_graver_where_classes_are_mixed() -> None:
    told = {"variables": {"NCCL_NET": "IB"}}
    assert [f.severity for f in findings(job(rank(0, **told), rank(1, **told)))] == ["note"]
    roce = (nic("eth0", "10.0.0.2/24"), nic("roce0", "10.2.0.2/24", **ROCE))
    found = findings(job(rank(0, **told), rank(1, nics=roce, **told)))
    assert [(f.severity, f.host) for f in found] == [("warning", "h0, h1")]


def test_findings_alike_become_one_and_facts_survive_json() -> None:
    alike = [Finding("note", "x", f"h{number}", "", "same", "fix") for number in range(6)]
    assert [finding.host for finding in merged(alike, 6)] == ["all 6"]
    assert [finding.host for finding in merged(alike[:5], 6)] == ["h0, h1, h2, h3 and 1 more"]
    facts = rank(1)
    assert RankFacts.from_dict(json.loads(json.dumps(facts.to_dict()))).nics == facts.nics


@pytest.mark.parametrize(
    "setting",
    [
        *("HOLMES_TLS=ja", "HOLMES_SECRET=abc", "HOLMES_PORT_RANGE=9-3"),
        *("HOLMES_METRICS_PORT=99999", "HOLMES_METRICS_ADDRESS=here"),
    ],
)
def test_variables_that_no_communicator_can_have(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert collect(0).variables_error == ""
    monkeypatch.setenv("HOLMES_METRICS_PORT", "9400")
    monkeypatch.setenv(*setting.split("="))
    assert setting.split("=")[0] in collect(0).variables_error


def test_attempts_against_real_sockets(tmp_path: Path) -> None:
    own, other = nic("lo", "127.0.0.1/8"), nic("lo", "127.0.0.2/8")
    with Responder(["127.0.0.2"], listening_ports("45000-45100")) as responder:
        port = responder.ports["127.0.0.2"]
        assert 45000 <= port <= 45100
        good = attempt("a", own, "b", other, port, responder.token, 2.0)
        assert good.outcome == "ok"
        assert good.round_trip_s is not None
        assert attempt("a", own, "b", other, port, "x" * 16, 2.0).outcome == "other host"
    assert attempt("a", own, "b", other, port, "x" * 16, 2.0).outcome == "refused"
    with socket.socket() as full:  # a backlog that is full drops connections, as a firewall does
        full.bind(("127.0.0.2", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname()):
            assert attempt("a", own, "b", other, full.getsockname()[1], "x" * 16, 0.3).outcome == "silent"
    table = tmp_path / "arp"
    table.write_text("IP address  HW type\n10.0.0.2 0x1 0x2 aa:bb * eth0\n10.0.0.3 0x1 0x0 00:00 * eth0\n")
    assert [known_to_arp(f"10.0.0.{n}", table) for n in (2, 3, 4)] == [True, False, None]


def test_clocks_are_compared_through_the_store() -> None:
    store = LocalStore()
    hosts = gather_hosts([rank(number) for number in range(3)])
    found: dict[int, list[Clock]] = {}

    def run(number: int, ahead_s: float) -> None:
        exchange = Exchange(store, number, 3, "t/x")
        found[number] = compare_clocks(exchange, store, "t/clock", hosts, lambda: time.time() + ahead_s)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate((0.0, 5.0, -3.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found[0] == found[1] == found[2]
    offsets = {clock.host: clock for clock in found[0]}
    assert abs(offsets["h1"].offset_s - 5) <= offsets["h1"].error_s + 0.01
    assert abs(offsets["h2"].offset_s + 3) <= offsets["h2"].error_s + 0.01
