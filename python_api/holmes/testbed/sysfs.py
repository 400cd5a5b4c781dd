"""Each node's fake sysfs: the emulated NICs as discovery sees them."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

from holmes.testbed.errors import TestbedError
from holmes.testbed.fabric import Step, sysfs_root
from holmes.testbed.spec import Node, Spec

_WRITE = """
import json, sys
sys.path.append(sys.argv[1])
from fake_sysfs import write_sysfs
for root, machine in json.load(sys.stdin).items():
    write_sysfs(root, machine, with_addresses=False)
"""


def node_sysfs(node: Node) -> dict[str, Any]:
    """Describes a node for `holmes_comm.fake_sysfs.write_sysfs`: classes, HCAs, emulated rates in Gbit/s, GPUs."""
    return {
        "interfaces": [
            {
                "name": nic.name,
                "nic_class": nic.nic_class,
                "hca": nic.hca or "",
                "speed_gbps": nic.rate_gbps,
                "mtu": nic.mtu,
                "addresses": [str(nic.address)],
            }
            for nic in node.nics
        ],
        "gpus": [{"pci": f"pci0080:00/0080:00:{index:02x}.0"} for index in range(node.gpus)],
    }


def write_all(spec: Spec) -> Step:
    """The command that writes every node's tree, inside the testbed: its files vanish with it."""
    trees = {str(sysfs_root(node.name)): node_sysfs(node) for node in spec.nodes}
    package = importlib.util.find_spec("holmes_comm")
    if package is None or not package.submodule_search_locations:
        raise TestbedError("package holmes_comm is not installed; install holmes-comm, of which it is a part")
    # By folder: fake_sysfs needs the standard library only, importing its package would load the engine.
    argv = [sys.executable, "-IS", "-c", _WRITE, next(iter(package.submodule_search_locations))]
    return Step("write the nodes' sysfs", argv, json.dumps(trees))
