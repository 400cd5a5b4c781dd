"""Each node's fake sysfs: the emulated NICs as discovery sees them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from holmes.lab import fake_sysfs
from holmes.lab.testbed.fabric import Step, sysfs_root
from holmes.lab.testbed.spec import Node, Spec

_WRITE = """
import json, sys
sys.path.append(sys.argv[1])
from fake_sysfs import write_sysfs
for root, machine in json.load(sys.stdin).items():
    write_sysfs(root, machine, with_addresses=False)
"""


def node_sysfs(node: Node) -> dict[str, Any]:
    """Describes a node for `holmes.lab.fake_sysfs.write_sysfs`: classes, HCAs, emulated rates in Gbit/s, GPUs."""
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
    # By folder: fake_sysfs needs the standard library only, importing its package would load what `holmes` needs.
    argv = [sys.executable, "-IS", "-c", _WRITE, str(Path(fake_sysfs.__file__).parent)]
    return Step("write the nodes' sysfs", argv, json.dumps(trees))
