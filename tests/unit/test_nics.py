"""Discovery on recorded machines against a table, what `holmes nics` prints of them, and selections."""

import ipaddress
import json
import os
import socket
from types import SimpleNamespace

import pytest
import yaml
from paths import FIXTURES
from typer.testing import CliRunner

from holmes.lab.fake_sysfs import write_sysfs
from holmes.tools.affinity import MEANINGS, affinity, placed
from holmes.tools.cli import load
from holmes_comm.errors import NicError, UsageError
from holmes_comm.nics import NicSelection, discover_gpus, discover_nics

MACHINES = FIXTURES / "machines"
EXPECTED = yaml.safe_load((MACHINES / "expected.yaml").read_text())
COLUMNS = EXPECTED.pop("columns")


def describe(machine):
    return yaml.safe_load((MACHINES / f"{machine}.yaml").read_text())


@pytest.fixture
def sysfs(tmp_path):
    """Writes a recorded machine's tree and returns its root."""
    return lambda machine: str(write_sysfs(tmp_path / machine, describe(machine)))


def by_name(root):
    return {nic.name: nic for nic in discover_nics(root)}


@pytest.mark.parametrize("machine", EXPECTED)
def test_80_columns_break_no_address_and_no_word(machine, sysfs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    root = sysfs(machine)
    shown = CliRunner().invoke(load("tools.cli.nics:nics"), ["--sysfs-root", root]).output
    assert max(map(len, shown.splitlines())) <= 80
    for nic in discover_nics(root):
        words = [nic.name, nic.port_name, *nic.addresses, *(gpu.removeprefix("0000:") for gpu in nic.nearest_gpus)]
        assert all(word in shown for word in words), shown


def test_every_machine_has_its_table():
    assert sorted(EXPECTED) == sorted(path.stem for path in MACHINES.glob("*.yaml") if path.stem != "expected")


@pytest.mark.parametrize("machine", EXPECTED)
def test_machine(machine, sysfs):
    found = [[getattr(nic, column) for column in COLUMNS] for nic in discover_nics(sysfs(machine))]
    assert found == EXPECTED[machine]


@pytest.mark.parametrize("machine", EXPECTED)
def test_cli_prints_every_nic(machine, sysfs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    root = sysfs(machine)
    nics = load("tools.cli.nics:nics")
    table = CliRunner().invoke(nics, ["--sysfs-root", root])
    as_json = CliRunner().invoke(nics, ["--json", "-", "--sysfs-root", root])
    assert table.exit_code == as_json.exit_code == 0
    for row in EXPECTED[machine]:
        assert row[0] in table.output
    assert [nic["name"] for nic in json.loads(as_json.output)] == [row[0] for row in EXPECTED[machine]]
    for nic in json.loads(as_json.output):
        assert all(address in table.output for address in nic["addresses"])


def test_cli_names_a_wrong_root(tmp_path):
    result = CliRunner().invoke(load("tools.cli.nics:nics"), ["--sysfs-root", str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert "nowhere" in result.output


def test_bond_vlan_and_virtual_function(sysfs):
    nics = by_name(sysfs("roce_bond_vlan"))
    assert nics["bond0"].members == ["eth2", "eth3"]
    assert nics["eth2"].master == "bond0"
    assert (nics["bond0.100"].parent, nics["bond0.100"].vlan_id) == ("bond0", 100)
    assert nics["eth6v0"].physical_function == "0000:af:00.0"
    assert nics["eth0"].has_gateway
    assert not nics["bond0"].has_gateway


def test_gid_is_the_ipv4_mapped_v2_one_of_the_interface(sysfs):
    for nic in discover_nics(sysfs("roce_bond_vlan")):
        if nic.nic_class != "roce_v2":
            continue
        gid = next(gid for gid in nic.gids if gid["index"] == nic.gid_index)
        assert gid["type"] == "RoCE v2"
        assert gid["netdev"] == nic.netdev
        assert str(ipaddress.IPv6Address(gid["gid"]).ipv4_mapped) == nic.address


def test_running_kernel_is_found():
    nics = by_name(None)
    assert nics.keys() == {name for _, name in socket.if_nameindex()}
    assert nics["lo"].nic_class == "loopback"


def test_a_tree_without_addresses_takes_the_kernels(tmp_path):
    """An emulated node: fake hardware, real addresses. An interface the kernel does not have is not reported."""
    interfaces = [
        {"name": "lo", "nic_class": "infiniband", "hca": "mlx5_0", "speed_gbps": 0.1, "addresses": ["10.1.0.1/24"]},
        {"name": "no_such0", "speed_gbps": 1},
    ]
    nics = by_name(str(write_sysfs(tmp_path, {"interfaces": interfaces}, with_addresses=False)))
    assert "no_such0" not in nics
    real = by_name("/sys")["lo"]
    assert (nics["lo"].nic_class, nics["lo"].port_name, nics["lo"].speed_gbps) == ("infiniband", "mlx5_0:1", 0.1)
    assert (nics["lo"].addresses, nics["lo"].is_netdev_up) == (real.addresses, real.is_netdev_up)


def test_an_interface_with_a_name_that_is_no_text_is_left_out(sysfs):
    root = sysfs("laptop")
    folder = os.fsencode(root) + b"/class/net/"
    before = by_name(root)
    for name in (b"v\xff", "w\u00f6".encode()):  # the second is a name like others
        os.mkdir(folder + name)
        for file, text in (("type", "1"), ("operstate", "up"), ("flags", "0x1003")):
            with open(folder + name + b"/" + file.encode(), "w") as out:
                out.write(text)
    assert set(by_name(root)) == {*before, "w\u00f6"}


def test_root_from_the_environment(sysfs, monkeypatch):
    monkeypatch.setenv("HOLMES_SYSFS_ROOT", sysfs("laptop"))
    assert [nic.name for nic in discover_nics()] == ["enp0s31f6", "wlp0s20f3", "lo"]


@pytest.mark.parametrize("line", ["eth0 10.0.0.1", "eth0 10.0.0.1/33", "eth0 10.0.0/24", "eth0"])
def test_malformed_addresses_are_named(tmp_path, line):
    write_sysfs(tmp_path, describe("laptop"))
    (tmp_path / "addresses").write_text(f"# of a laptop\n{line}\n")
    with pytest.raises(UsageError, match="line 2"):
        discover_nics(str(tmp_path))


def test_absent_root_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="HOLMES_SYSFS_ROOT"):
        discover_nics(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("machine", "error"),
    [
        ({"interfaces": [{"name": "eth0", "sped_gbps": 1}]}, "sped_gbps"),
        ({"interfaces": [{"name": "bond0", "kind": "bond", "members": ["eth7"]}]}, "eth7"),
        ({"interfaces": [{"name": "ib0", "nic_class": "infiniband", "hca": "mlx5_0", "state": "asleep"}]}, "asleep"),
        ({"gpus": [{"pci": "0000:01:00.0", "vendor": "voodoo"}]}, "voodoo"),
    ],
)
def test_wrong_machine_is_named(tmp_path, machine, error):
    with pytest.raises(ValueError, match=error):
        write_sysfs(tmp_path, machine)


@pytest.mark.parametrize(
    ("machine", "selection", "names"),
    [
        ("infiniband8", "", ["ib0", "ib0.8001", "ib1", "ib2", "ib3", "ib4", "ib5", "ib6", "ib7", "ib8", "eno3"]),
        ("infiniband8", "mlx5_1*", ["ib6", "ib7", "ib8"]),
        ("infiniband8", "mlx5_0:1,eno3", ["ib0", "eno3"]),
        ("infiniband8", "class:ethernet", ["eno3"]),
        ("infiniband8", "class:infiniband,subnet:10.2.0.0/16", ["ib8"]),
        ("roce_bond_vlan", "class:roce", ["bond0", "bond0.100", "eth4"]),
        ("roce_bond_vlan", "class:roce_v1", ["eth4"]),
        ("roce_bond_vlan", "mlx5_bond_0", ["bond0"]),
        ("roce_bond_vlan", "subnet:fd00:20::/64", ["bond0"]),
        ("infiniband_and_roce", "fastest", ["ibp1s0", "enp33s0np0", "eno1"]),
        ("cloud_ethernet", "eth9,eth1", ["eth1"]),
        ("loopback_only", "", []),
        ("loopback_only", "lo", ["lo"]),
    ],
)
def test_selection_resolves(machine, selection, names, sysfs):
    found = NicSelection.parse(selection).resolve(discover_nics(sysfs(machine)))
    assert [nic.name for nic in found] == names


def test_address_of_the_selected_subnet_comes_first(sysfs):
    nics = discover_nics(sysfs("roce_bond_vlan"))
    assert NicSelection(subnet="fd00:20::/64").resolve(nics)[0].address == "fd00:20::1"
    assert NicSelection(("bond0",)).resolve(nics)[0].address == "10.20.0.1"


@pytest.mark.parametrize(
    ("machine", "selection", "nic", "words"),
    [
        ("laptop", "eth9", "eth9", ["'eth9'", "enp0s31f6", "wlp0s20f3", "Fix"]),
        ("laptop", "enp0s31f6", "enp0s31f6", ["enp0s31f6 is down", "ip link set enp0s31f6 up"]),
        ("roce_bond_vlan", "eth2", "eth2", ["eth2 has no address"]),
        ("infiniband_and_roce", "ibp97s0", "ibp97s0", ["ibp97s0 is down", "port ibp97s0:1 is in state 'init'"]),
        ("laptop", "class:infiniband", "", ["'infiniband'", "wlp0s20f3 (ethernet, up, 192.168.1.23/24)"]),
        ("infiniband_and_roce", "ibp65s0", "ibp65s0:1", ["ibp65s0:1 has no network interface"]),
        ("infiniband8", "subnet:10.77.0.0/16", "ib0", ["10.77.0.0/16", "eno3"]),
    ],
)
def test_wrong_selection_says_what_exists(machine, selection, nic, words, sysfs):
    with pytest.raises(NicError) as raised:
        NicSelection.parse(selection).resolve(discover_nics(sysfs(machine)))
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert raised.value.nic == nic


@pytest.mark.parametrize(
    ("env", "selection"),
    [
        ({}, NicSelection()),
        ({"HOLMES_NICS": "class:roce"}, NicSelection(nic_class="roce")),
        ({"HOLMES_NICS": "fastest", "HOLMES_TRANSPORT": "tcp"}, NicSelection(fastest=True, transport="tcp")),
        ({"HOLMES_NICS": "eth1, eth2"}, NicSelection(("eth1", "eth2"))),
        ({"HOLMES_NICS": "mlx5_*,mlx5_0:1"}, NicSelection(("mlx5_*", "mlx5_0:1"))),
        ({"HOLMES_NICS": "subnet:fd00::/64,eth*"}, NicSelection(("eth*",), subnet="fd00::/64")),
    ],
)
def test_selection_from_the_environment(env, selection):
    assert NicSelection.from_env(env) == selection


@pytest.mark.parametrize(
    ("env", "error"),
    [
        ({"HOLMES_NICS": "class:token_ring"}, "token_ring"),
        ({"HOLMES_NICS": "subnet:10.0.0.1/8"}, "10.0.0.1/8"),
        ({"HOLMES_NICS": "class:roce,class:ethernet"}, "two of 'class'"),
        ({"HOLMES_TRANSPORT": "pigeon"}, "pigeon"),
    ],
)
def test_wrong_environment_is_named(env, error):
    with pytest.raises(UsageError, match=error):
        NicSelection.from_env(env)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"names": 3}, "names=3 are no names of NICs"),
        ({"names": ["eth0", None]}, "are no names of NICs"),
        ({"nic_class": 3}, "nic_class=3 is of another type than it can be; give text"),
        ({"fastest": "yes"}, "fastest='yes' is of another type"),
        ({"subnet": b"10.0.0.0/8"}, "subnet=b.* is of another type"),
        ({"max_rails": 1.5}, "max_rails=1.5 is of another type than it can be; give a whole number, or None"),
        ({"max_rails": 1 << 31}, "max_rails=2147483648 is beyond what its type can hold"),
        ({"streams": "2"}, "streams='2' is of another type than it can be; give a whole number"),
        ({"streams": True}, "streams=True is of another type"),
    ],
)
def test_fields_of_wrong_types_are_named(fields, words):
    with pytest.raises(UsageError, match=words):
        NicSelection(**fields)


def test_rails_are_asked_for_in_the_selection() -> None:
    assert NicSelection.parse("class:roce,rails:2") == NicSelection(nic_class="roce", max_rails=2)
    with pytest.raises(UsageError, match="max_rails=0 is not possible; it must be from 1 to 64"):
        NicSelection(max_rails=0)
    with pytest.raises(UsageError, match="rails:two is no number"):
        NicSelection.parse("rails:two")


# --- GPU by NIC ---

NEAR = {
    "infiniband8": ("0000:1b:00.0", {"ib0": "PIX", "ib1": "NODE", "ib8": "NODE", "ib4": "SYS", "eno3": "NODE"}),
    "infiniband_and_roce": ("0000:43:00.0", {"ibp65s0:1": "PHB", "ibp97s0": "NODE", "ibp1s0": "SYS"}),
    "roce_bond_vlan": ("0000:3d:00.0", {"bond0": "PHB", "eth2": "PHB", "eth0": "NODE", "eth4": "SYS"}),
    "cloud_ethernet": ("0001:00:00.0", {"enP2s2": "NODE"}),
}


@pytest.mark.parametrize("machine", NEAR)
def test_words_of_gpus_and_nics(machine, sysfs):
    root = sysfs(machine)
    found, gpus = placed(discover_nics(root)), discover_gpus(root)
    words = affinity(gpus, found)
    gpu, expected = NEAR[machine]
    row = dict(zip([nic.name for nic in found], words[[one["pci_address"] for one in gpus].index(gpu)], strict=True))
    assert {name: row[name] for name in expected} == expected
    assert not any(nic.parent for nic in found)
    order = list(MEANINGS)
    for nic, column in zip(found, zip(*words, strict=True), strict=True):
        best = min(map(order.index, column))
        nearest = {one["pci_address"] for one, word in zip(gpus, column, strict=True) if order.index(word) == best}
        assert set(nic.nearest_gpus) <= nearest


def test_two_switches_are_pxb_and_two_functions_of_a_device_pix():
    def word(one, other):
        gpu = {"pci_path": f"devices/pci0000:00/{one}", "numa_node": 0}
        nic = SimpleNamespace(name="n", parent="", pci_path=f"devices/pci0000:00/{other}", numa_node=0, members=[])
        return affinity([gpu], [nic])[0][0]

    assert word("up/s/a/gpu", "up/s/b/t/c/nic") == "PXB"
    assert word("up/s/a/gpu", "up/s/b/nic") == "PIX"
    assert word("up/gpu.0", "up/nic.1") == "PIX"
    assert word("one/gpu", "two/nic") == "PHB"


@pytest.mark.parametrize("machine", EXPECTED)
def test_the_matrix_fits_80_columns(machine, sysfs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    root = sysfs(machine)
    run = CliRunner().invoke(load("tools.cli.nics:nics"), ["--matrix", "--sysfs-root", root])
    assert run.exit_code == 0
    assert max(map(len, run.output.splitlines())) <= 80
    printed = CliRunner().invoke(load("tools.cli.nics:nics"), ["--matrix", "--json", "-", "--sysfs-root", root]).output
    rows = json.loads(printed)
    assert len(rows) == len(discover_gpus(root))
    if rows and rows[0]["nics"]:
        assert all(name in run.output for name in rows[0]["nics"])
        assert all(word in run.output for row in rows for word in row["nics"].values())
    else:
        assert "no matrix" in run.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class:", "has nothing behind 'class:'"),
        ("eth0,subnet:", "has nothing behind 'subnet:'"),
        (",", "has no word between its commas"),
        (" , ,", "has no word between its commas"),
    ],
)
def test_a_word_that_names_nothing_is_no_selection(text, words):
    with pytest.raises(UsageError, match=words):
        NicSelection.parse(text)


@pytest.mark.parametrize("field", ["nic_class", "subnet"])
def test_an_empty_condition_is_none(field):
    with pytest.raises(UsageError, match=f"{field}='' is none; name one, or leave it out"):
        NicSelection(**{field: ""})
