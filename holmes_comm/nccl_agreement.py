"""How the ranks of an NCCL communicator agree on the NICs it uses: which of them carry data, which the handshakes."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from holmes_comm import _C, errors
from holmes_comm.nic_agreement import agree_group, wait_for
from holmes_comm.nic_selection import NicSelection, host_name

__all__ = ["NcclAgreement", "agree_nccl", "nccl_package_paths"]

_RDMA_CLASSES = ("infiniband", "roce", "roce_v1", "roce_v2")


class NcclAgreement(NamedTuple):
    """What the ranks agreed on: this rank's profile, the NICs of the host-memory communicator beside it, the reason."""

    profile: _C.NcclProfile
    nics: list[_C.Nic]
    reason: str


def nccl_package_paths() -> list[str]:
    """The libnccl of each installed Python package that has one (nvidia-nccl-cu12, -cu13). Local."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None and spec.submodule_search_locations else []
    found = [Path(place) / "nccl" / "lib" / "libnccl.so.2" for place in places]
    return [str(path) for path in found if path.exists()]


def agree_nccl(
    store: Any,
    rank: int,
    size: int,
    selection: NicSelection | None = None,
    *,
    timeout_s: float,
    key_prefix: str,
    sysfs_root: str | os.PathLike[str] | None = None,
    variables: dict[str, str] | None = None,
    host_id: str = "",
) -> NcclAgreement:
    """Chooses, together with the other ranks, what NCCL may use. Collective over the `size` ranks of `store`.

    RDMA where every rank's NICs are of one RDMA class and one link layer, else sockets, on all ranks alike. An HCA port
    without a network interface of its own can carry data; the handshakes then go over the fastest interface that all
    ranks share. selection: as in agree_nics; with a class "infiniband" or "roce" sockets are refused. variables,
    host_id: as in NcclProfile. Raises on every rank as agree_nics does, and NicError where RDMA is asked for and a rank
    has none.
    """
    deadline = time.monotonic() + timeout_s
    selection = NicSelection.from_env() if selection is None else selection
    root = None if sysfs_root is None else os.fspath(sysfs_root)
    bare = _bare_ports(selection, root)
    shared = agree_group(
        store,
        rank,
        size,
        NicSelection() if bare else selection,
        timeout_s=timeout_s,
        key_prefix=key_prefix,
        sysfs_root=root,
        max_rails=1 if bare else None,
    )
    nics = bare or list(dict.fromkeys(shared.nics))
    own = {
        "host": host_name(),
        "classes": sorted({nic.nic_class.split("_")[0] for nic in nics}),
        "ports": all(nic.port_name and nic.is_up for nic in nics) and bool(nics),
        "wants_rdma": selection.nic_class in _RDMA_CLASSES,
        "names": ", ".join(nic.name for nic in nics),
    }
    records = _exchange(store, rank, size, own, deadline, f"{key_prefix}/nccl")
    use_rdma, reason = _decide(records)
    profile = _C.NcclProfile(
        "IB" if use_rdma else "Socket",
        [nic.port_name for nic in nics] if use_rdma else [],
        list(dict.fromkeys(nic.netdev for nic in shared.nics)) or ["lo"],
        gid_index=_gid_index(nics) if use_rdma else None,
        variables=variables or {},
        host_id=host_id,
    )
    return NcclAgreement(profile, shared.nics, f"{shared.reason}; {reason}")


def _bare_ports(selection: NicSelection, sysfs_root: str | None) -> list[_C.Nic]:
    """The asked-for HCA ports where none of them has an interface: TCP cannot use those, NCCL can."""
    if not selection.names and selection.nic_class not in _RDMA_CLASSES:
        return []
    ports = [nic for nic in _C.discover_nics(sysfs_root) if nic.port_name and nic.is_up and not nic.netdev]
    try:
        named = selection.matching(ports)
    except errors.NicError:
        return []
    try:
        selection.resolve(_C.discover_nics(sysfs_root))
    except errors.NicError:
        return named[: selection.max_rails]
    return []


def _exchange(
    store: Any, rank: int, size: int, own: dict[str, Any], deadline: float, prefix: str
) -> list[dict[str, Any]]:
    store.set(f"{prefix}/{rank}", json.dumps(own))
    records = []
    for peer in range(size):
        if not wait_for(store, f"{prefix}/{peer}", deadline):
            raise errors.TimeoutError(
                f"rank {peer} of {size} did not say which NICs its NCCL may use: check that it is running and makes "
                "this call",
                rank=rank,
                peer=peer,
            )
        records.append(json.loads(store.get(f"{prefix}/{peer}")))
    return records


def _decide(records: list[dict[str, Any]]) -> tuple[bool, str]:
    """Whether all ranks use RDMA, and why. The same on every rank."""
    classes = {name for record in records for name in record["classes"]}
    all_ports = all(record["ports"] for record in records)
    if all_ports and len(classes) == 1:
        return True, f"NCCL uses {classes.pop()}"
    who = "; ".join(
        f"rank {rank} (host {record['host']}): {record['names'] or 'no NIC'} ({', '.join(record['classes']) or 'none'})"
        for rank, record in enumerate(records)
    )
    if any(record["wants_rdma"] for record in records):
        bad = next((rank for rank, record in enumerate(records) if not record["ports"]), 0)
        raise errors.NicError(
            f"InfiniBand or RoCE is asked for, but not all ranks have active ports of one class: {who}. Fix: choose a "
            "class that all have, or leave the class out",
            peer=bad,
            host=records[bad]["host"],
        )
    return False, "NCCL uses sockets" + (f", as not all ranks have one kind of RDMA port ({who})" if classes else "")


def _gid_index(nics: list[_C.Nic]) -> int | None:
    """The GID index of RoCE ports, where all have the same; NCCL chooses itself else."""
    found = {nic.gid_index for nic in nics if nic.nic_class.startswith("roce")}
    return found.pop() if len(found) == 1 else None
