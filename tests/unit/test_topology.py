"""The topology's lookups and its file: templates, round trips, hand edits, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from topologies import assumed, hosts_of, ib, port, two_clusters
from typer.testing import CliRunner

from holmes.cluster.topology import Fabric, Host, Link, Port, Topology, TopologyFinding, make_topology
from holmes.cluster.topology.tables import print_topology
from holmes.tools.cli import load

EIGHT_CLUSTERS = (
    """
kind: holmes topology
version: 2
hosts:
"""
    + "".join(
        f"""
- count: 256
  name: {name}{{:03}}
  ranks_per_host: 8
  gpu: A100-SXM4-80GB
  gpu_memory_gib: 80
  gpu_tflops: 312
  ports:
  - {{count: 8, name: 'mlx5_{{}}', nic_class: {nic_class}, subnet: '{name}-rail{{}}', speed_gbps: 200}}
  - {{name: eth0, nic_class: ethernet, subnet: wan, speed_gbps: 25}}
"""
        for name, nic_class in zip("abcdefgh", ["infiniband", "roce_v2"] * 4, strict=True)
    )
    + """
fabrics:
- {name: ethernet wan, measured_gbps: 20, latency_s: 50e-6}
"""
)


def read(text: str) -> Topology:
    return Topology.from_dict(yaml.safe_load(text))


def test_16384_gpus_by_hand_in_a_hundred_lines() -> None:
    assert EIGHT_CLUSTERS.count("\n") < 110
    topology = read(EIGHT_CLUSTERS)
    assert topology.world_size == 16384
    assert [len(cluster.ranks) for cluster in topology.clusters] == [2048] * 8
    assert [cluster.nic_class for cluster in topology.clusters[:2]] == ["infiniband", "roce_v2"]
    assert topology.clusters[1].hosts[3] == "b003"
    host = topology.host_of(2048 * 7 + 8)
    assert (host.name, host.ranks[0], host.gpu, host.gpu_memory_gib, host.gpu_tflops) == (
        "h001", 2048 * 7 + 8, "A100-SXM4-80GB", 80, 312,
    )  # fmt: skip
    assert [fabric.name for fabric in topology.rails([0, 9])] == [f"infiniband a-rail{i}" for i in range(8)]
    wan = topology.shared_fabrics([0, 2048])
    assert [(f.name, f.speed_gbps, f.rate_gbps, f.latency_s) for f in wan] == [("ethernet wan", 25, 20, 50e-6)]


def test_a_large_topology_is_saved_as_short_as_it_was_written(tmp_path: Path) -> None:
    topology = read(EIGHT_CLUSTERS.split("fabrics:")[0])
    topology.save(tmp_path / "eight.yaml")
    text = (tmp_path / "eight.yaml").read_text()
    assert text.count("\n") < 150
    assert "name: c{:03}" in text
    assert Topology.load(tmp_path / "eight.yaml") == topology
    rated = read(EIGHT_CLUSTERS)
    assert Topology.from_dict(rated.to_dict()) == rated


def test_hosts_that_only_look_like_a_run_are_saved_one_by_one() -> None:
    port = (Port("eth0", "ethernet", "", "s"),)
    alike = [Host(f"a{i}", f"a{i}", (2 * i, 2 * i + 1), port) for i in range(3)]
    assert [entry["name"] for entry in make_topology(alike, []).to_dict()["hosts"]] == ["a{}"]
    for odd in (
        Host("a2", "a2", (4,), port),
        Host("a3", "a3", (4, 5), port),
        Host("a2", "elsewhere", (4, 5), port),
        Host("a2", "a2", (4, 5), (Port("eth0", "ethernet", "10.0.0.1", "s"),)),
        Host("a2", "a2", (4, 5), port, gpu="H100"),
    ):
        topology = make_topology([*alike[:2], odd], [])
        assert [entry["name"] for entry in topology.to_dict()["hosts"]] == ["a{}", odd.name]
        assert Topology.from_dict(topology.to_dict()) == topology
    shuffled = make_topology([Host("a0", "a0", (2, 3), port), Host("a1", "a1", (0, 1), port)], [])
    assert Topology.from_dict(shuffled.to_dict()) == shuffled


class CountedRanks(tuple[int, ...]):
    """Ranks that count how often they are walked through."""

    walks = 0

    def __iter__(self) -> Iterator[int]:
        CountedRanks.walks += 1
        return super().__iter__()

    def __contains__(self, rank: object) -> bool:
        CountedRanks.walks += 1
        return super().__contains__(rank)


def test_lookups_walk_through_the_ranks_once() -> None:
    hosts = [
        Host(f"n{i}", f"n{i}", CountedRanks(range(8 * i, 8 * i + 8)), (Port("eth0", "ethernet", "", "s"),))
        for i in range(12_500)
    ]
    ports = {host.name: "eth0" for host in hosts}
    topology = make_topology(hosts, [Fabric("ethernet s", "ethernet", "s", 1.0, ports)])
    CountedRanks.walks = 0
    for rank in range(100_000):
        assert topology.host_of(rank) is hosts[rank // 8]
    assert len(topology.shared_fabrics(range(100_000))) == 1
    assert topology.cluster_of(99_999).name == "cluster 0"
    assert CountedRanks.walks <= len(hosts)


def test_unknown_names_and_ranks() -> None:
    topology = two_clusters()
    assert topology.host_named("n1").ranks == (1,)
    assert topology.fabric_named("infiniband 10.1.0.0/24").speed_gbps == 200
    assert topology.cluster_of(3).name == "cluster 1"
    with pytest.raises(ValueError, match="rank 7 is not in this topology; it has ranks 0 to 3"):
        topology.host_of(7)
    with pytest.raises(ValueError, match="rank -1 is not in"):
        topology.cluster_of(-1)
    with pytest.raises(ValueError, match="no host 'n9' in this topology; it has n0, n1, n2, n3"):
        topology.host_named("n9")
    with pytest.raises(ValueError, match="no fabric 'x' in this topology; it has infiniband"):
        topology.fabric_named("x")


def test_a_nic_in_two_fabrics_counts_once() -> None:
    roce_only = [[port("roce_v2", f"10.9.0.{host}")] for host in (3, 4)]
    topology = assumed(hosts_of(ib(1), ib(2), *roce_only))
    assert [f.nic_class for f in topology.fabrics] == ["infiniband", "roce_v2", "ethernet"]
    assert [f.nic_class for f in topology.shared_fabrics([2, 3])] == ["roce_v2"]
    assert [f.nic_class for f in topology.shared_fabrics([0, 1])] == ["infiniband", "ethernet"]
    assert [f.nic_class for f in topology.shared_fabrics([0, 3])] == ["ethernet"]


def test_rails_are_alike_by_measured_rate() -> None:
    hosts = hosts_of(*[[port("roce_v2", f"10.{r}.0.{h}", name=f"r{r}") for r in (1, 2, 3)] for h in (1, 2)])
    rates = {"r1": (38.0, True), "r2": (20.0, True), "r3": (90.0, False)}
    fabrics = [
        Fabric(
            f"roce {nic}", "roce_v2", nic, 200.0, {"id0": nic, "id1": nic}, True, measured_gbps=rate, host_limited=limit
        )
        for nic, (rate, limit) in rates.items()
    ]
    topology = make_topology(hosts, fabrics)
    # r1 and r2 were bounded by the hosts, so their line rate counts; r3's wire is slower than it says.
    assert [f.rate_gbps for f in topology.fabrics] == [200.0, 200.0, 90.0]
    assert [f.subnet for f in topology.rails([0, 1])] == ["r1", "r2"]


def full_topology() -> Topology:
    """One with every optional field set."""
    base = two_clusters(ranks_per_host=2)
    hosts = [Host(h.name, h.host_id, h.ranks, h.ports, "H100", 80.0, 989.0) for h in base.hosts]
    fabrics = [
        Fabric(
            f.name, f.nic_class, f.subnet, f.speed_gbps, f.ports, True,
            measured_gbps=1.5, measured_min_gbps=0.25, latency_s=3e-6, host_limited=f.nic_class == "infiniband",
        )
        for f in base.fabrics
    ]  # fmt: skip
    findings = [TopologyFinding("rate", "n1", "ib0", "0.1 of the others'", "check the cable")]
    links = [Link(("cluster 0", "cluster 1"), "ethernet 10.9.0.0/24", 0.4, 2e-5, 2, 0.3)]
    return make_topology(hosts, fabrics, findings, links)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_what_is_saved_is_loaded(tmp_path: Path, suffix: str) -> None:
    for number, topology in enumerate((full_topology(), two_clusters(), make_topology(hosts_of([], ib(1)), []))):
        path = tmp_path / f"{number}.{suffix}"
        topology.save(path)
        assert Topology.load(path) == topology


def test_unknown_fields_are_left_out_of_the_file(tmp_path: Path) -> None:
    two_clusters().save(tmp_path / "t.yaml")
    text = (tmp_path / "t.yaml").read_text()
    for word in ("null", "gpu", "measured", "findings", "false", "fabrics"):
        assert word not in text
    full_topology().save(tmp_path / "full.yaml")
    assert "ports: {n0: eth0, n1: eth0, n2: eth0, n3: eth0}" in (tmp_path / "full.yaml").read_text()  # hosts by name


def test_no_confirmed_fabric_stays_none() -> None:
    topology = make_topology(hosts_of(ib(1), ib(2)), [])
    again = Topology.from_dict(topology.to_dict())
    assert again.fabrics == ()
    data = topology.to_dict()
    del data["fabrics"]  # a person leaves them to the NICs
    assert [f.nic_class for f in Topology.from_dict(data).fabrics] == ["infiniband", "ethernet"]


def test_ranks_listed_in_any_order() -> None:
    text = """{kind: holmes topology, version: 2, hosts: [
        {name: b, ranks: [3, 0], ports: [{name: e, nic_class: ethernet, subnet: s}]},
        {name: a, ranks: [1, 2], ports: [{name: e, nic_class: ethernet, subnet: s}]}]}"""
    topology = read(text)
    assert topology.clusters[0].ranks == (0, 3, 1, 2)
    assert topology.host_of(3).name == "b"


def broken(change: str) -> str:
    """A good file of two hosts with one thing replaced: "old -> new"."""
    good = json.dumps(
        {
            "kind": "holmes topology",
            "version": 2,
            "hosts": [
                {"name": "a{}", "count": 2, "ranks_per_host": 4, "gpu_tflops": 312,
                 "ports": [{"name": "ib0", "nic_class": "infiniband", "subnet": "ib", "speed_gbps": 200}]},
                {"name": "b", "ranks": [8, 9],
                 "ports": [{"name": "eth0", "nic_class": "ethernet", "subnet": "wan", "speed_gbps": 25},
                           {"name": "ib1", "nic_class": "infiniband", "subnet": "ib", "address": "10.0.0.1"}]},
            ],
            "fabrics": [{"name": "infiniband ib", "measured_gbps": 180}],
        }
    )  # fmt: skip
    old, new = change.split(" -> ")
    assert old in good
    return good.replace(old, new, 1)


def test_the_good_file_is_good() -> None:
    assert Topology.from_dict(json.loads(broken("180 -> 180"))).fabrics[0].measured_gbps == 180


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('"infiniband", "subnet" -> "infinband", "subnet"',
         r"hosts\[0\]\.ports\[0\]\.nic_class is 'infinband'; it must be one of .* the nearest is 'infiniband'"),
        ('"speed_gbps": 200 -> "speed_gpbs": 200',
         r"hosts\[0\]\.ports\[0\] has an unknown key 'speed_gpbs'; did you mean 'speed_gbps'\?"),
        ('"speed_gbps": 25 -> "speed_gbps": -25',
         r"hosts\[1\]\.ports\[0\]\.speed_gbps is -25; it must be a number above 0, or left out where unknown"),
        ('"gpu_tflops": 312 -> "gpu_tflops": "fast"', r"hosts\[0\]\.gpu_tflops is 'fast'; it must be a number above 0"),
        ('"subnet": "wan", -> ', r"hosts\[1\]\.ports\[0\]\.subnet is missing; it must be a text"),
        ('"subnet": "wan" -> "subnet": 10.1', r"subnet is 10\.1; it must be a text \(in quotes\)"),
        ('"count": 2 -> "count": 0', r"hosts\[0\]\.count is 0; it must be a whole number of 1 or more"),
        ('"name": "a{}" -> "name": "a"', r"hosts\[0\]\.name is 'a' with count: 2; it needs '\{\}' in it, for"),
        ('"name": "a{}" -> "name": "a{x}"', r"hosts\[0\]\.name is 'a\{x\}'.*'\{\}' stands for the number"),
        ('"ranks": [8, 9] -> "ranks": [7, 9]', r"rank 7 is on hosts a1 and b; give it to one of them"),
        ('"ranks": [8, 9] -> "ranks": [8, 11]',
         r"the hosts have 10 ranks, but none has rank 9; they must be 0 to 9"),
        ('"ranks": [8, 9] -> "ranks": [8, 9], "count": 2', r"hosts\[1\] has ranks and count; list the ranks, or"),
        ('"ranks": [8, 9] -> "ranks": "8-9"', r"hosts\[1\]\.ranks is '8-9'; it must be a list with at least one entry"),
        ('"ranks": [8, 9] -> "ranks": [8, 9.5]', r"hosts\[1\]\.ranks is \[8, 9\.5\]; it must be a list of whole"),
        ('"name": "b" -> "name": "a1"', r"hosts: name 'a1' is used twice; give each its own"),
        ('"name": "ib1" -> "name": "eth0"', r"hosts\[1\]\.ports: name 'eth0' is used twice"),
        ('"infiniband ib" -> "infiniband wan"',
         r"fabrics\[0\] has no ports and names 'infiniband wan', .*\(those that do: infiniband ib\)"),
        ('"measured_gbps": 180 -> "host_limited": true', r"fabrics\[0\]\.host_limited needs ports"),
        ('"measured_gbps": 180 -> "nic_class": "infiniband", "subnet": "ib", "ports": {"a0": "ib0", "c": "ib0"}',
         r"fabrics\[0\]\.ports names host 'c', which is not in hosts"),
        ('"measured_gbps": 180 -> "nic_class": "infiniband", "subnet": "ib", "ports": {"a0": "ib0", "b": "ib7"}',
         r"fabrics\[0\]\.ports\.b is 'ib7', but host b has no such NIC; it has eth0, ib1"),
        ('"measured_gbps": 180 -> "nic_class": "infiniband", "subnet": "ib", "ports": {"a0": "ib0"}',
         r"fabrics\[0\]\.ports is \{'a0': 'ib0'\}; it must be a mapping of two or more hosts"),
        ('"hosts": [ -> "host": [', r"the file has an unknown key 'host'; did you mean 'hosts'\?"),
        ('"version": 2 -> "version": 3', r"holmes topology version 3 is unknown"),
    ],
)  # fmt: skip
def test_a_bad_file_gives_one_error_with_place_value_and_fix(tmp_path: Path, change: str, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(broken(change))
    with pytest.raises(ValueError, match=message) as caught:
        Topology.load(path)
    assert str(caught.value).startswith(f"{path}: ")


# The command line


def run_cli(*args: object) -> tuple[int, str]:
    runner = CliRunner(env={"COLUMNS": "160"})
    app = load("tools.cli.topology:topology")
    result = runner.invoke(app, [str(arg) for arg in args], prog_name="holmes topology")
    return result.exit_code, result.output


def test_a_file_is_shown_converted_and_drawn_without_a_job(tmp_path: Path) -> None:
    full_topology().save(tmp_path / "t.yaml")
    code, output = run_cli(tmp_path / "t.yaml", "--save", tmp_path / "t.json", "--draw", tmp_path / "t.png")
    assert code == 0, output
    for text in (
        "cluster 1",
        "n3",
        "H100",
        ">= 1.5",
        "3 us",
        "0.3 (shared)",
        "host n1 NIC ib0 (rate): 0.1 of the others'",
    ):
        assert text in " ".join(output.split())
    assert Topology.load(tmp_path / "t.json") == full_topology()
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    code, output = run_cli(tmp_path / "t.yaml", "--json", "-")
    assert Topology.from_dict(json.loads(output)) == full_topology()


def test_many_hosts_alike_take_a_row(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(EIGHT_CLUSTERS)
    code, output = run_cli(tmp_path / "t.yaml", "--draw", tmp_path / "t.svg")
    assert code == 0, output
    assert len(output.splitlines()) < 120
    picture = (tmp_path / "t.svg").read_text()
    assert picture.count("cluster") >= 8


def test_bad_arguments_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(broken('"speed_gbps": 25 -> "speed_gbps": 0'))
    code, output = run_cli(path)
    assert code == 2
    assert f"holmes topology: {path}: hosts[1].ports[0].speed_gbps is 0; it must be a number above 0" in output
    assert run_cli(tmp_path / "none.yaml")[0] == 2
    path.write_text(broken("200 -> 200"))
    code, output = run_cli(path, "--draw", tmp_path / "t.txt")
    assert code == 2
    assert "must end in .svg, .png or .pdf" in output


def test_names_in_brackets_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    ports = [{"name": "e[red]", "nic_class": "ethernet", "subnet": "[w]", "speed_gbps": 10}]
    hosts = {"count": 2, "name": "a[/b]{}", "ranks_per_host": 1, "ports": ports}
    topology = Topology.from_dict({"kind": "holmes topology", "version": 2, "hosts": [hosts]})
    print_topology(Console(width=160), topology)
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("a[/b]0", "e[red]", "ethernet [w]"))
