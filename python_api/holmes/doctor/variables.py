"""Environment variables that override what Holmes, NCCL and Gloo decide by themselves, and what each does."""

from __future__ import annotations

#: Those that Holmes reads (docs/environment.md).
HOLMES = {
    "HOLMES_NICS": "NICs of every communicator that names none",
    "HOLMES_REPLACES": "groups that name Gloo are made by Holmes",
    "HOLMES_CLUSTER": "the cluster of this rank, for hierarchical collectives",
    "HOLMES_CLUSTER_NICS": "NICs inside the cluster",
    "HOLMES_HIERARCHICAL_MIN_BYTES": "replaces the measured size from which operations run hierarchically",
    "HOLMES_TRANSPORT": "forces TCP or shared memory",
    "HOLMES_SHM": "0: no shared memory between ranks of a host",
    "HOLMES_CMA": "whether ranks of a host read each other's memory",
    "HOLMES_SECRET": "the job's secret",
    "HOLMES_SECRET_FILE": "file with the job's secret",
    "HOLMES_TLS": "which TCP connections are encrypted",
    "HOLMES_SSL_LIBRARY": "the OpenSSL library to load",
    "HOLMES_PORT_RANGE": "ports of listening sockets",
    "HOLMES_CONNECT_TIMEOUT_S": "replaces the code's deadline of a communicator's set-up",
    "HOLMES_RAIL_TIMEOUT_S": "when a silent rail counts as lost",
    "HOLMES_TCP_CONGESTION": "congestion control of data sockets",
    "HOLMES_SPIN_US": "how long waiting threads poll",
    "HOLMES_IO_THREADS": "threads that move bytes",
    "HOLMES_IO_CPUS": "processors of these threads",
    "HOLMES_NCCL_LIBRARY": "the NCCL library to use",
    "HOLMES_CUDA_LIBRARY": "the CUDA driver to use",
    "HOLMES_NCCL_IMAGE": "form of further NCCL images",
    "HOLMES_NCCL_IMAGE_FOLDER": "where further NCCL images are kept",
    "HOLMES_LOG": "what is logged",
    "HOLMES_HOSTNAME": "name of this host in messages",
    "HOLMES_SYSFS_ROOT": "NICs are read from this folder, not from /sys",
    "HOLMES_TESTBED": "this is an emulated node",
    "HOLMES_PINNED_RING_BYTES": "page-locked memory for messages of a GPU's memory",
    "HOLMES_FLIGHT_RECORDER": "operations that are remembered for diagnosis",
    "HOLMES_FLIGHT_RECORDER_DIR": "where flight records are written",
    "HOLMES_FLIGHT_RECORDER_SIGNAL": "signal on which they are written",
    "HOLMES_METRICS_PORT": "where metrics are served",
    "HOLMES_STORE": "the store of an elastic job",
    "HOLMES_FALSE_CLOCK": "set by holmes stress",
    "HOLMES_BENCH_JOB_NETWORK_FD": "set by holmes bench",
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
    "MASTER_ADDR",
    "MASTER_PORT",
)
