"""How the ranks of a group agree on the NICs they use: what this rank brings, from its NICs and its selection."""

from __future__ import annotations

import os
import resource
from typing import Any, Literal, NamedTuple

from holmes_comm import _C, errors
from holmes_comm._C import host_identity, host_name
from holmes_comm.errors import SystemError
from holmes_comm.nic_selection import NicSelection

Carrier = Literal["tcp", "nccl", "rdma", "auto"]
_FOR_SYSFS = 4  # that reading it has open at a time, and some to spare


class Agreement(NamedTuple):
    """What the ranks of a group agreed on: this rank's NICs, its HCA ports (where there is RDMA; else empty), the
    reason, and the cluster that every rank names."""

    nics: list[_C.Nic]
    ports: list[_C.Nic]
    reason: str
    clusters: list[str]


def agree_group(
    store: Any,
    rank: int,
    size: int,
    selection: NicSelection | None = None,
    *,
    timeout_s: float,
    key_prefix: str,
    sysfs_root: str | os.PathLike[str] | None = None,
    max_rails: int | None = None,
    cluster: str = "",
    carrier: Carrier = "tcp",
    no_rdma: str = "",
    secret: str = "",
) -> Agreement:
    """Chooses, together with the other ranks, the NICs the group uses. Collective over the `size` ranks of `store`.

    Returns this rank's NICs (rails, in the same order on every rank; bind `nic.address` of `nic.netdev`; all of them
    again for each further stream), the reason in words, and every rank's `cluster`. The choice is that of docs/nics.md:
    the fastest network (link layer and subnet) in which every rank has a usable NIC, by the speed of its slowest
    member; where speeds are about equal InfiniBand before RoCE before Ethernet. RoCE on some ranks and plain Ethernet
    on others of one subnet counts as Ethernet. Where no network is shared: Ethernet with a gateway on every rank. Where
    all ranks are on one host and `selection` asks for nothing: loopback; the list may then be empty.

    store: any object with set, get and wait, as torch.distributed's stores are. selection: what to choose from; None:
    HOLMES_NICS and HOLMES_TRANSPORT. It may differ between ranks. timeout_s: seconds to wait for the other ranks.
    key_prefix: keys used in the store; a fresh one for every call. sysfs_root: as in discover_nics. max_rails: return
    up to so many NICs of the best network's class, fastest first; None: what the selections say, the smallest number
    where they differ. cluster: name of this rank's cluster; all ranks or none have one. carrier: "nccl" chooses also
    among RDMA ports, with an IP address or not; `nics` then are those of its handshakes. "rdma": the same, but a port
    there must be, and more than one only where asked for, and `nics` are for the set-up. "auto": as "tcp", and with it
    ports as of "rdma" where all ranks on several hosts share some that are no slower. no_rdma: why this rank takes none
    then ("asks for tls='all'"), whatever it has; empty: nothing. secret: the job's; empty: HOLMES_SECRET or
    HOLMES_SECRET_FILE.
    Raises on every rank: ProtocolError where what a rank wrote into the store was changed or its secret is another,
    NicError where a rank's selection is wrong, nothing is shared or only some name a cluster,
    SystemError where a rank has no descriptors left to look at its NICs, TimeoutError where one did not take part; all
    name the rank and its host.
    """
    nics: list[_C.Nic] = []
    host, place = host_name(), host_identity()
    try:
        check_descriptors()
        nics = _C.discover_nics(None if sysfs_root is None else os.fspath(sysfs_root))
        selection = NicSelection.from_env() if selection is None else selection
        offer = selection.offer(nics, carrier, host, place)
        if max_rails is not None:
            offer.max_rails = max_rails
        offer.cluster = cluster
        offer.no_rdma = no_rdma
    except (errors.HolmesError, OSError) as error:
        system_errno = error.errno if isinstance(error, OSError) else None
        if isinstance(error, errors.SystemError):
            system_errno = error.system_errno
        offer = _C.NicOffer(host, place)
        offer.fail(str(error), getattr(error, "nic", "") or "", system_errno)
    sockets, ports, reason, clusters = _C.agree_nics(
        store, rank, size, offer, f"{key_prefix}/nics", timeout_s, carrier, secret
    )
    by_name = {nic.name: nic for nic in nics}
    by_port = {nic.port_name: nic for nic in reversed(nics) if nic.kind != "vlan"}
    return Agreement(
        [by_name[name].with_address(ip) for name, ip in sockets], [by_port[port] for port in ports], reason, clusters
    )


def agree_nics(
    store: Any, rank: int, size: int, selection: NicSelection | None = None, **options: Any
) -> tuple[list[_C.Nic], str]:
    """As agree_group, for a group without clusters: this rank's NICs and the reason. Collective."""
    agreement = agree_group(store, rank, size, selection, **options)
    return agreement.nics, agreement.reason


def check_descriptors() -> None:
    """Where too few are left to read sysfs, NICs would look as if they were not there. Raises SystemError."""
    spare: list[int] = []
    try:
        for _ in range(_FOR_SYSFS):
            spare.append(os.open("/", os.O_RDONLY | os.O_CLOEXEC))  # one by one: all are closed again
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise SystemError(
            f"cannot look at the NICs: {error.strerror} (errno {error.errno}); this process may open {limit} files "
            "(ulimit -n), raise that",
            system_errno=error.errno,
        ) from error
    finally:
        for descriptor in spare:
            os.close(descriptor)
