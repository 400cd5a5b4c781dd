"""What a testbed's description allows, where ranks go, and the commands that build nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from holmes.lab.testbed import SpecError, Testbed, TestbedError, builtin_specs, fabric, load_spec
from holmes.lab.testbed.cli import app
from holmes.lab.testbed.launch import place_ranks, rank_environment
from holmes.lab.testbed.requirements import find_line_program
from holmes.lab.testbed.spec import parse_spec
from holmes.lab.testbed.sysfs import node_sysfs


@pytest.mark.parametrize("name", builtin_specs())
def test_builtin_specs_load(name: str) -> None:
    spec = load_spec(name)
    assert spec.nodes
    assert spec.description
    addresses = [nic.address for node in spec.nodes for nic in node.nics]
    assert len(set(addresses)) == len(addresses)
    assert all(node.nic_on(spec.common_network) for node in spec.nodes)


def test_two_clusters_share_only_ethernet_a_tenth_as_fast() -> None:
    spec = load_spec("two-clusters")
    assert [node.name for node in spec.nodes] == ["a0", "a1", "b0", "b1"]
    assert spec.common_network == "eth"
    assert spec.node("a0").nic("ib0").nic_class == "infiniband"
    assert spec.node("b0").nic("roce0").nic_class == "roce_v2"
    assert spec.networks["eth"].rate_gbps == pytest.approx(spec.networks["ib"].rate_gbps / 10)


_SMALL = {
    "networks": {"eth": {"class": "ethernet", "rate_gbps": 1}, "ib": {"class": "infiniband", "rate_gbps": 2}},
    "clusters": {
        "a": {
            "nodes": {"n0": {}, "n1": {"ib0": {"name": "ibp9", "hca": "mlx5_7", "rate_gbps": 1}}},
            "gpus_per_node": 2,
            "nics": [{"name": "ib0", "network": "ib", "hca": "mlx5_0"}, {"name": "eth0", "network": "eth"}],
        }
    },
}


def test_nodes_that_are_kernels() -> None:
    spec = load_spec("two-clusters-rdma")
    assert (spec.kernel, spec.common_network) == ("uml", "eth")
    assert [nic.has_ip for nic in spec.node("a0").nics] == [False, True]
    for change, told in (
        ({"kernel": "xen"}, "kernel is 'xen'; it must be one of host, uml"),
        ({"kernel": "uml"}, "n0.ib0 is infiniband, but Soft-RoCE"),
        ({"networks": {**_SMALL["networks"], "ib": {"class": "infiniband", "ip": False}}}, r"networks.ib.ip is false"),
        ({"networks": {**_SMALL["networks"], "ib": {"class": "infiniband", "ip": 0}}}, r"ib.ip is 0; it must be true"),
    ):
        with pytest.raises(SpecError, match=told):
            parse_spec("mine", {**_SMALL, **change})


def test_a_file_that_breaks_a_rule_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**_SMALL, "kernel": "plan9"}))
    with pytest.raises(SpecError, match=r"mine\.yaml: kernel is 'plan9'"):
        load_spec(tmp_path / "mine.yaml")


def test_names_and_rates_may_differ_per_node(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(_SMALL))
    spec = load_spec(tmp_path / "mine.yaml")
    assert spec.name == "mine"
    assert [(nic.name, nic.hca, nic.rate_gbps) for nic in spec.node("n1").nics] == [
        ("ibp9", "mlx5_7", 1.0),
        ("eth0", None, 1.0),
    ]
    assert spec.node("n0").nic("ib0").rate_gbps == 2.0
    described = node_sysfs(spec.node("n1"))
    assert described["interfaces"][0]["nic_class"] == "infiniband"
    assert described["interfaces"][0]["speed_gbps"] == 1.0
    assert len(described["gpus"]) == 2


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("networks", "eth", "rate_gbps"), -1, "networks.eth.rate_gbps is -1; it must be a number above 0"),
        (("networks", "eth", "class"), "token-ring", "must be one of infiniband, roce_v2, roce_v1, ethernet"),
        (("networks", "eth", "mtu"), 100, "integer from 576 to 9000"),
        (("networks", "eth", "speed"), 1, "unknown key 'speed'"),
        (("clusters", "a", "nodes"), 0, "clusters.a.nodes is 0; it must be a mapping"),
        (("clusters", "a", "nodes"), {"Bad_Name": {}}, "host name"),
        (("clusters", "a", "nodes"), {"n0": {"ib9": {}}}, "unknown key 'ib9'; allowed are ib0, eth0"),
        (("clusters", "a", "nics"), [{"name": "ib0", "network": "ib"}], "needs an hca"),
        (("clusters", "a", "nics"), [{"name": "eth0", "network": "wan"}], "network is 'wan'; networks are eth, ib"),
        (("clusters", "a", "nics"), [{"name": "a" * 16, "network": "eth"}], "1 to 15 characters"),
        (("networks", "eth", "delay_ms"), -1, "networks.eth.delay_ms is -1; it must be a number from 0 to 10000"),
        (("networks", "eth", "delay_ms"), "20", "delay_ms is '20'; it must be a number from 0 to 10000"),
        (("networks", "eth", "delay_ms"), float("nan"), "delay_ms is nan; it must be a number from 0 to 10000"),
        (("networks", "eth", "jitter_ms"), 3, r"eth.jitter_ms is 3, more than delay_ms \(0\).*make delay_ms larger"),
        (("networks", "eth", "loss_percent"), 100, "eth.loss_percent is 100; it must be a number from 0 to 99"),
        (("networks", "eth", "reorder_percent"), 1, "eth.reorder_percent is 1, but without a delay.*give delay_ms"),
        (("networks", "eth", "queue_bytes"), 1000, "eth.queue_bytes is 1000; it must be an integer from 65536 to"),
        (
            ("networks", "eth", "queue_bytes"),
            2**32,
            "bytes is 4294967296; it must be an integer from 65536 to 42949672",
        ),
        (("networks", "eth", "queue_ms"), 10**400, "eth.queue_ms is 1000.*; it must be a number from 0 to 60000"),
        (("networks", "eth", "rate_gbps"), 10**400, "eth.rate_gbps is 1000.*; it must be a number from 1e-05 to 10000"),
        (
            ("clusters", "site b"),
            {"nodes": 1, "nics": []},
            "clusters has the name 'site b'; it must be 1 to 64 charact",
        ),
        (
            ("networks", "w\nan"),
            {"class": "ethernet"},
            r"networks has the name 'w\\nan'; it must be 1 to 64 characters",
        ),
        (("networks", ""), {"class": "ethernet"}, "networks has the name ''; it must be 1 to 64 characters of A-Z"),
        (("networks", "eth", "receive_gbps"), 0, "eth.receive_gbps is 0; it must be a number above 0"),
        (("networks", "eth", "uplink"), 1, "networks.eth.uplink is 1; it must be a mapping"),
        (("networks", "eth", "uplink"), {"loss": 1}, "eth.uplink has an unknown key 'loss'; allowed are rate_gbps"),
        (("networks", "eth", "uplink"), {"queue_bytes": 1 << 20}, "uplink.queue_bytes is 1048576, but nothing waits"),
        (("networks", "wan"), {"class": "ethernet", "uplink_gbps": 1, "uplink": {}}, "write the rate as uplink.rate_"),
        (("networks", "wan"), {"class": "ethernet", "queue_ms": 1, "queue_bytes": 99999}, "both queue_ms and queue_b"),
        (("clusters", "a", "nodes"), {"n0": {"eth0": {"jitter_ms": 1}}}, "nodes.n0.eth0.jitter_ms is 1, more than"),
        (
            ("networks", "eth", "rate_gbps"),
            float("inf"),
            "eth.rate_gbps is inf; it must be a number from 1e-05 to 10000",
        ),
        (("networks", "eth", "rate_gbps"), 1e-9, "eth.rate_gbps is 1e-09; it must be a number from 1e-05 to 10000"),
        (("networks", "eth", "receive_gbps"), 1e9, "eth.receive_gbps is 1000000000.0; it must be a number from 1e-05"),
        (("networks", "eth", "queue_ms"), float("inf"), "eth.queue_ms is inf; it must be a number from 0 to 60000"),
        (("clusters",), {}, "clusters is empty"),
        (("clusters", "a", "nodes"), 10**9, "clusters.a.nodes is 1000000000; it must be a number from 1 to 1024"),
        (("clusters", "a", "gpus_per_node"), 10**6, "gpus_per_node is 1000000; it must be an integer from 0 to 64"),
        (("clusters", "a", "nics"), [{"name": "all", "network": "eth"}], "none of lo, ., .., all, default"),
        (("clusters", "a", "nics"), [{"name": 5, "network": "eth"}], "a NIC's name is text of 1 to 15 characters"),
        (("clusters", "a", "nics"), [{"name": "i", "network": "ib", "hca": "../../x"}], "i.hca is '../../x'; it must"),
        (("seed",), -1, "seed is -1; it must be an integer from 0 to 4294967295"),
        (("clusters", "b"), {"nodes": 1, "nics": [{"name": "x", "network": "e"}]}, "network is 'e'"),
    ],
)
def test_bad_spec_is_refused(path: tuple[str, ...], value: object, message: str) -> None:
    data = json.loads(json.dumps(_SMALL))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(SpecError, match=message):
        parse_spec("bad", data)


def test_a_nic_has_its_networks_link_but_for_what_it_states() -> None:
    data = json.loads(json.dumps(_SMALL))
    data["networks"]["eth"] |= {"delay_ms": 20, "jitter_ms": 2, "loss_percent": 0.01, "queue_bytes": 100_000}
    data["clusters"]["a"]["nodes"]["n1"]["eth0"] = {"delay_ms": 5, "queue_ms": 10, "receive_gbps": 0.5}
    spec = parse_spec("far", data)
    as_network, own = spec.node("n0").nic("eth0"), spec.node("n1").nic("eth0")
    assert (as_network.delay_ms, as_network.queue_bytes, as_network.receives_gbps) == (20, 100_000, 1)
    assert (own.delay_ms, own.jitter_ms, own.loss_percent, own.rate_gbps) == (5, 2, 0.01, 1)
    assert (own.queue_bytes, own.queue_ms, own.receives_gbps) == (None, 10, 0.5)


def test_uplink_gbps_is_an_uplink_with_a_rate() -> None:
    data = json.loads(json.dumps(_SMALL))
    data["networks"]["eth"] |= {"uplink_gbps": 0.1, "queue_ms": 5}
    short = parse_spec("up", data)
    del data["networks"]["eth"]["uplink_gbps"]
    data["networks"]["eth"]["uplink"] = {"rate_gbps": 0.1}
    assert parse_spec("up", data) == short
    uplink = short.networks["eth"].uplink
    assert uplink is not None
    assert (uplink.rate_gbps, uplink.queue_ms, uplink.is_plain) == (0.1, 5, True)


@pytest.mark.parametrize(("rate_gbps", "queue"), [(1, "latency 50000us"), (690, f"limit {2**32 - 1}")])
def test_a_queue_is_no_longer_than_the_kernel_counts(rate_gbps: float, queue: str) -> None:
    data = json.loads(json.dumps(_SMALL))
    data["networks"]["eth"]["rate_gbps"] = rate_gbps  # tc takes 50 ms of 690 Gbit/s modulo 2^32: 0.2 ms
    steps = fabric.build(parse_spec("fast", data))
    shapes = [line for line in steps[-1].stdin.splitlines() if f"rate {rate_gbps * 10**9}bit" in line]
    assert shapes
    assert all(line.endswith(queue) for line in shapes)


def test_nodes_without_a_common_network_are_refused() -> None:
    data = json.loads(json.dumps(_SMALL))
    data["clusters"]["b"] = {"nodes": 1, "nics": [{"name": "x0", "network": "ib", "hca": "h"}]}
    data["clusters"]["a"]["nics"] = data["clusters"]["a"]["nics"][1:]
    data["clusters"]["a"]["nodes"] = 1
    with pytest.raises(SpecError, match="no network joins all nodes"):
        parse_spec("bad", data)


def test_unknown_spec_names_the_builtin_ones() -> None:
    with pytest.raises(SpecError, match="two-clusters"):
        load_spec("no-such-spec")


def test_ranks_fill_nodes_in_order_or_shuffled() -> None:
    spec = load_spec("two-clusters")
    assert place_ranks(spec, 2)[:3] == [("a0", 0), ("a0", 1), ("a1", 0)]
    shuffled = place_ranks(spec, 2, shuffle_seed=3)
    assert shuffled != place_ranks(spec, 2)
    assert sorted(shuffled) == sorted(place_ranks(spec, 2))
    assert shuffled == place_ranks(spec, 2, shuffle_seed=3)
    master = spec.node(shuffled[0][0]).nic("eth0").address.ip
    assert rank_environment(spec, shuffled, 5)["MASTER_ADDR"] == str(master)


def test_missing_tools_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool, path=None: None if tool in ("ip", "tc") else f"/bin/{tool}")
    with pytest.raises(TestbedError, match=r"`ip` from iproute2, `tc` from iproute2.*apt install iproute2"):
        Testbed("pair").run(["true"])


def test_a_missing_line_program_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("holmes_comm.__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(TestbedError, match=r"need .*/bin/holmes-line, which this installation lacks: install Holmes"):
        find_line_program()


def _invoke(*args: str) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 0, result.output
    return result.output


def test_show_lists_every_nic() -> None:
    output = _invoke("show", "rails")
    for text in ("roce0 (mlx5_0)", "roce1 (mlx5_1)", "10.11.0.2/16", "0.25"):
        assert text in output


def test_show_yaml_is_a_spec() -> None:
    output = _invoke("show", "two-clusters", "--yaml")
    assert parse_spec("two-clusters", yaml.safe_load(output)) == load_spec("two-clusters")


def test_specs_lists_the_builtin_ones() -> None:
    output = _invoke("specs")
    for name in builtin_specs():
        assert name in output


def test_help_imports_no_subcommand() -> None:
    code = "import sys; from holmes.tools.cli import main\ntry: main(['--help'])\nexcept SystemExit as e: pass\n"
    code += "print([m for m in sys.modules if m.startswith(('torch', 'numpy', 'holmes.lab.testbed', 'holmes_comm'))])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    for name in ("nics", "topology", "testbed", "bench", "demo"):
        assert name in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
