"""Environment variables that override what Holmes, NCCL and Gloo decide by themselves, and what each does."""

from __future__ import annotations

import re

from holmes_comm import _C


def plain(markdown: str) -> str:
    """The text without links and code marks."""
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", markdown).replace("`", "")


#: Those that Holmes reads, with the first sentence of what docs/environment.md says of each.
HOLMES = {
    variable.name: plain(variable.meaning).split(". ")[0].rstrip(".")
    for variable in _C.env_variables()
    if variable.name.startswith("HOLMES_")
}

#: What others read and what it overrides: (effect, whether it usually is a mistake in a job of several NIC classes).
OTHERS = {
    "NCCL_NET": ("overrides the network of every NCCL communicator, also one that Holmes names", True),
    "NCCL_IB_DISABLE": ("1: NCCL uses no InfiniBand or RoCE at all", True),
    "NCCL_IB_HCA": ("one list of HCAs for all NCCL communicators of the process, read once", True),
    "NCCL_COMM_ID": ("fixes the address at which NCCL's ranks meet, for every communicator", True),
    "NCCL_IB_GID_INDEX": ("one GID index for all NICs", True),
    "NCCL_P2P_DISABLE": ("1: no NVLink and no PCIe peer access", True),
    "NCCL_SHM_DISABLE": ("1: no shared memory between GPUs of a host", True),
    "NCCL_NET_PLUGIN": ("loads this network plugin first, and disables others", True),
    "NCCL_SOCKET_IFNAME": ("the interfaces of NCCL's sockets, in all communicators", False),
    "NCCL_TOPO_FILE": ("replaces what NCCL finds out of the machine", False),
    "NCCL_ALGO": ("forces NCCL's algorithm", False),
    "NCCL_PROTO": ("forces NCCL's protocol", False),
    "NCCL_CROSS_NIC": ("whether NCCL's rings change NICs between hosts", False),
    "NCCL_NET_GDR_LEVEL": ("how far from a GPU a NIC may read its memory", False),
    "NCCL_DEBUG": ("what NCCL logs", False),
    "GLOO_SOCKET_IFNAME": ("the interfaces of all Gloo groups", False),
    "TP_SOCKET_IFNAME": ("the interface of TensorPipe", False),
    "UCX_NET_DEVICES": ("the NICs of all UCX contexts", False),
    "UCX_TLS": ("the transports of UCX", False),
}

#: Equal on all ranks, or the job fails or hangs.
MUST_AGREE = (
    "HOLMES_HIERARCHICAL_MIN_BYTES",
    "HOLMES_REPLACES",
    "HOLMES_TLS",
    "HOLMES_TRANSPORT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_ALGO",
    "NCCL_COMM_ID",
    "NCCL_CROSS_NIC",
    "NCCL_IB_DISABLE",
    "NCCL_NET",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
)

#: Set by launchers for every job: not worth a line.
USUAL = (
    "HOLMES_TESTBED",
    "HOLMES_HOSTNAME",
    "HOLMES_BENCH_JOB_NETWORK_FD",
    "HOLMES_FALSE_CLOCK",
    "HOLMES_FAULTY_CALLS",
    "MASTER_ADDR",
    "MASTER_PORT",
)

NOT_READ = "Holmes has no such variable, nothing reads it"


def fix_of(name: str) -> str | None:
    """What to do about a variable that looks like one of Holmes' and is none; None: it is one."""
    if not name.startswith("HOLMES_") or name in HOLMES or name in USUAL:
        return None
    near = _C.variable_meant_by(name)
    return f"write {near}" if near else "unset it; docs/environment.md lists all"
