"""Two groups of one process on two interfaces, shown by byte counters: `gpu_interfaces.py [--plugin] [--dry-run]`.

Starts itself on the two nodes of an emulated testbed (network namespaces, no root needed), each a rank with the same
GPU. Each rank makes one NCCL communicator per interface that both have, moves some data over each, and reads the
kernel's counters: the bytes must have left by the communicator's interface and no other. Each has an NCCL image of its
own, or, with `--plugin`, both the stock library, to which Holmes is a network plugin (docs/plugin.md).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_memory import memory, use_fakes

COUNT = 1 << 20  # float32 elements
SHARE = 0.9  # of the expected bytes that the chosen interface must have carried; headers come on top
INTERFACES = ("net0", "net1")
STRAY = 0.05  # at most so much on another one: the set-up's own traffic


def run_on_nodes(script: str, nodes: int) -> int:
    """The exit status of a script that runs on so many emulated nodes, a rank each; they have both interfaces."""
    spec_text = f"""
networks:
  first: {{class: ethernet, rate_gbps: 1}}
  second: {{class: ethernet, rate_gbps: 1}}
clusters:
  a:
    nodes: {nodes}
    nics:
      - {{name: {INTERFACES[0]}, network: first}}
      - {{name: {INTERFACES[1]}, network: second}}
"""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as spec:
        spec.write(spec_text)
        spec.flush()
        command = ["testbed", "run", "--spec", spec.name, "--timeout-s", "200", "--", sys.executable, script]
        return subprocess.run([sys.executable, "-m", "holmes", *command], timeout=240, check=False).returncode


def sent_bytes() -> dict[str, int]:
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return {name.strip(): int(rest.split()[8]) for name, rest in (line.split(":", 1) for line in lines)}


def run_rank(over_plugin: bool) -> None:
    from gpu_ranks import communicator

    import holmes_comm

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = holmes_comm.TcpStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_server=rank == 0)
    selections = {name: holmes_comm.NicSelection(names=(name,)) for name in INTERFACES}
    if over_plugin:
        os.environ["NCCL_HOSTID"] = f"rank{rank}"  # else NCCL refuses two ranks on one GPU
        options: dict[str, Any] = {"backend": "nccl", "device": 0, "timeout_s": 120.0}
        comms = {
            name: holmes_comm.init(store, rank, size, name=name, nics=nics, **options)
            for name, nics in selections.items()
        }
        assert all(", stock library " in one.description for one in comms.values()), [
            one.description for one in comms.values()
        ]
    else:
        comms = {
            name: communicator(store, rank, size, name=name, nics=nics, nccl_variables={"NCCL_HOLMES_NUMBER": name})
            for name, nics in selections.items()
        }
    place = memory(comms[INTERFACES[0]].device)
    rows = {}
    for name, comm in comms.items():
        data = place.make(COUNT, 1.0)
        comm.barrier()
        before = sent_bytes()
        comm.all_reduce(data.array)
        assert place.values(data) == {float(size)}
        comm.barrier()
        after = sent_bytes()
        rows[name] = {nic: after[nic] - before[nic] for nic in after if after[nic] != before[nic]}
        carried = rows[name].get(name, 0)
        stray = sum(count for nic, count in rows[name].items() if nic != name)
        # With two ranks each sends at least all of its data once.
        assert carried >= SHARE * 4 * COUNT, (name, rows[name])
        assert stray <= STRAY * 4 * COUNT, (name, rows[name])
    if rank == 0:
        print(json.dumps({"sent_bytes": rows, "communicators": {name: c.description for name, c in comms.items()}}))
    comms[INTERFACES[0]].barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", action="store_true", help="the stock NCCL over NCCL's network plugin")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(os.environ.get("HOLMES_NCCL_NET") == "holmes")
        return
    if arguments.dry_run:
        use_fakes()
    if arguments.plugin:
        os.environ.update(NCCL_NET_PLUGIN="holmes", HOLMES_NCCL_NET="holmes")
    sys.exit(run_on_nodes(__file__, 2))


if __name__ == "__main__":
    main()
