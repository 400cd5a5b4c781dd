"""NCCL's network plugin as it is installed: found by its name, and HOLMES_NICS means there what it means in Python."""

import os
import subprocess
import sys

import pytest
import yaml
from paths import FIXTURES

from holmes.lab.fake_sysfs import write_sysfs
from holmes_comm.errors import NicError, UsageError
from holmes_comm.nics import NicSelection, agree_nics, discover_nics

MACHINES = FIXTURES / "machines"
INVALID_USAGE = 5  # ncclResult_t

# What NCCL does with a plugin first: opens the library of that name, takes the table, calls init with its logger.
PROGRAM = """
import ctypes, sys
logger_type = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p
)
logger = logger_type(lambda level, subsystems, file, line, pattern, text: print(pattern.decode() % text.decode()))
table = (ctypes.c_void_p * 19).in_dll(ctypes.CDLL("libnccl-net-holmes.so"), "ncclNetPlugin_v8")
sys.exit(ctypes.CFUNCTYPE(ctypes.c_int, logger_type)(table[1])(logger))
"""


def lib_dir() -> str:
    command = [sys.executable, "-m", "holmes_comm", "--lib-dir"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def init(sysfs_root, selection):
    """Starts the plugin in a process of its own: its result and what it wrote into NCCL's log."""
    env = {**os.environ, "LD_LIBRARY_PATH": lib_dir(), "HOLMES_SYSFS_ROOT": str(sysfs_root), "HOLMES_NICS": selection}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60)
    return run.returncode, run.stdout.strip()


class OneRankStore:
    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value

    def get(self, key):
        return self.values[key]

    def wait(self, keys, timeout):
        assert all(key in self.values for key in keys)


@pytest.fixture
def machine(tmp_path):
    """Writes a recorded machine's tree and returns its root."""
    return lambda name: str(write_sysfs(tmp_path / name, yaml.safe_load((MACHINES / f"{name}.yaml").read_text())))


@pytest.mark.parametrize(
    ("name", "selection"),
    [
        ("cloud_ethernet", "class:ethernet"),
        ("infiniband_and_roce", "class:roce,rails:4"),
        ("infiniband_and_roce", "class:infiniband,rails:2"),
        ("infiniband8", "mlx5_*,rails:8"),
        ("roce_bond_vlan", "bond0"),
        ("laptop", "lo"),
    ],
)
def test_the_nics_are_those_of_python(machine, name, selection):
    root = machine(name)
    nics, _ = agree_nics(
        OneRankStore(), 0, 1, NicSelection.parse(selection), sysfs_root=root, timeout_s=10, key_prefix="one"
    )
    assert nics
    assert init(root, selection) == (0, "NET/holmes : using " + ", ".join(f"{nic.name} {nic.address}" for nic in nics))


@pytest.mark.parametrize("name", ["infiniband_and_roce", "roce_bond_vlan", "laptop", "loopback_only"])
@pytest.mark.parametrize(
    "selection",
    ["eth77", "ib77,mlx9_*", "class:infiniband,names", "subnet:192.0.3.0/24", "class:roce,subnet:10.99.0.0/16"],
)
def test_what_is_not_there_is_told_in_the_words_of_python(machine, name, selection):
    root = machine(name)
    with pytest.raises(NicError) as refused:
        NicSelection.parse(selection).resolve(discover_nics(root))
    assert init(root, selection) == (INVALID_USAGE, f"NET/holmes : {refused.value}")


@pytest.mark.parametrize(
    "selection",
    ["class:token-ring", "rails:two", "rails:0", "streams:65", "rails:8,streams:9", "class:roce,class:ethernet"],
)
def test_wrong_words_are_told_in_those_of_python(machine, selection):
    with pytest.raises(UsageError) as refused:
        NicSelection.parse(selection)
    assert init(machine("laptop"), selection) == (INVALID_USAGE, f"NET/holmes : {refused.value}")


def test_the_library_needs_only_what_is_beside_it_and_exports_its_tables_and_what_docs_name():
    library = os.path.join(lib_dir(), "libnccl-net-holmes.so")
    dynamic = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    needed = [line for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert any("libholmes.so" in line for line in needed)
    assert not [line for line in needed if "python" in line or "torch" in line or "cuda" in line or "nccl" in line]
    assert "NODELETE" in dynamic
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    tables = [f"ncclNetPlugin_v{version}" for version in range(8, 13)]
    functions = [f"holmes_nccl_net_{name}" for name in ("assign", "check", "uses")]
    assert sorted(line.split()[-1] for line in symbols.splitlines()) == sorted([*tables, *functions])
    assert "soname: [libnccl-net-holmes.so]" in dynamic
