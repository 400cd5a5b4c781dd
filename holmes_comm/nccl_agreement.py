"""How the ranks of an NCCL communicator agree on the NICs it uses: which of them carry data, which the handshakes."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, NamedTuple

from holmes_comm import _C
from holmes_comm.nic_agreement import agree_group
from holmes_comm.nic_selection import NicSelection, text_of

__all__ = ["NcclAgreement", "agree_nccl", "nccl_package_paths"]


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
    secret: str = "",
    net: str = "socket",
) -> NcclAgreement:
    """Chooses, together with the other ranks, what NCCL may use. Collective over the `size` ranks of `store`.

    The rule of docs/nics.md: RDMA where every rank has active ports of one kind that share a network and sockets are
    not faster, else sockets, on all ranks alike. A port without a network interface of its own can carry data; the
    handshakes then go over the fastest interface that all ranks share. selection: as in agree_nics; without
    `max_rails` NCCL gets every port of the class; with a class "infiniband" or "roce" sockets are refused. variables,
    host_id: as in NcclProfile. secret: the job's. net: what carries the data where that is not RDMA, "socket" or
    "holmes" (Holmes as NCCL's plugin); where the ranks differ in it, making the communicator raises UsageError. Raises
    on every rank as agree_nics does, and NicError where RDMA is asked for and not all ranks have it. Where no NIC is
    asked for and the site has a plugin (an EFA; NCCL_NET_PLUGIN or NCCL_NET, unless `net` asks for Holmes as such),
    NCCL's own choice is kept; where only some ranks have one, making the communicator raises NicError.
    """
    agreement = agree_group(
        store,
        rank,
        size,
        selection,
        timeout_s=timeout_s,
        key_prefix=key_prefix,
        sysfs_root=sysfs_root,
        cluster=text_of("HOLMES_CLUSTER"),
        carrier="nccl",
        secret=secret,
    )
    is_plugin = net == "holmes"
    site = _site_transport(sysfs_root, is_plugin) if selection is None or not selection.restricts else ""
    if site:
        # Its NICs are not ours to name: NCCL chooses as it does without Holmes.
        handshakes = [nic.netdev for nic in agreement.nics]
        profile = _C.NcclProfile("Site", [], handshakes, variables=variables or {}, host_id=host_id)
        return NcclAgreement(profile, agreement.nics, f"{agreement.reason}; NCCL uses the site's transport: {site}")
    profile = _C.NcclProfile(
        "IB" if agreement.ports else "holmes" if is_plugin else "Socket",
        [nic.port_name for nic in agreement.ports],
        list(dict.fromkeys(nic.netdev for nic in agreement.nics)) or ["lo"],
        gid_index=_gid_index(agreement.ports),
        variables=variables or {},
        host_id=host_id,
    )
    return NcclAgreement(profile, agreement.nics, agreement.reason)


def _site_transport(sysfs_root: str | os.PathLike[str] | None, is_plugin: bool) -> str:
    """What of this host says that NCCL is to use a plugin of the site; empty: nothing. is_plugin: Holmes is one."""
    variables = {} if is_plugin else os.environ
    plugin, net = variables.get("NCCL_NET_PLUGIN", ""), variables.get("NCCL_NET", "")
    if plugin and plugin != "none":
        return f"NCCL_NET_PLUGIN={plugin}"
    if net and net.lower() not in ("ib", "socket"):
        return f"NCCL_NET={net}"
    # EFA: listed with the HCAs, but NCCL itself cannot use it.
    for device in sorted(Path(sysfs_root or "/sys").glob("class/infiniband/*")):
        if (device / "device" / "driver").resolve().name == "efa":
            return f"{device.name} is an EFA"
    return ""


def _gid_index(nics: list[_C.Nic]) -> int | None:
    """The GID index of RoCE ports, where all have the same; NCCL chooses itself else."""
    found = {nic.gid_index for nic in nics if nic.nic_class.startswith("roce")}
    return found.pop() if len(found) == 1 else None
