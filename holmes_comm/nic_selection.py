"""NicSelection: says which NICs a group uses."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from holmes_comm._C import Nic, host_name
from holmes_comm.errors import NicError, UsageError

# What each class of a selection covers.
NIC_CLASSES = {
    "infiniband": ("infiniband",),
    "roce": ("roce_v2", "roce_v1"),
    "roce_v2": ("roce_v2",),
    "roce_v1": ("roce_v1",),
    "ethernet": ("ethernet",),
    "loopback": ("loopback",),
}
TRANSPORTS = ("auto", "tcp", "shm")
MAX_RAILS = 64  # what a communicator can connect


@dataclass(frozen=True)
class NicSelection:
    """Which NICs a group uses. Conditions add up; none at all means the fastest NIC that all members share.

    names: interfaces ("eth1"), HCA ports ("mlx5_0:1") or HCAs ("mlx5_0"), glob patterns allowed ("mlx5_*"). They are
        alternatives: names may differ per node, and every node must have at least one of them.
    nic_class: "infiniband", "roce" (or "roce_v1", "roce_v2"), "ethernet" or "loopback".
    fastest: the fastest NIC that all members share; this is also what happens when nothing is said.
    subnet: only NICs with an address in it ("10.1.0.0/16").
    transport: "auto" (shared memory between ranks of one host, else TCP), "tcp" (always) or "shm" (one host only).
    max_rails: stripe every operation over up to so many NICs of the best class that all members share, whatever their
        speeds; where ranks differ, the smallest number counts. None: one for sockets; NCCL gets every port of the class
        and about the speed of the best.
    streams: connections over each NIC, for links that one TCP connection cannot fill (long ones, very fast ones); where
        ranks differ, the smallest number counts.

    Raises UsageError where a field has a value it cannot have. Immutable, so safe to share between threads.
    """

    names: tuple[str, ...] = ()
    nic_class: str | None = None
    fastest: bool = False
    subnet: str | None = None
    transport: str = "auto"
    max_rails: int | None = None
    streams: int = 1

    def __post_init__(self) -> None:
        names = (self.names,) if isinstance(self.names, str) else tuple(self.names)
        object.__setattr__(self, "names", names)
        if self.nic_class is not None and self.nic_class not in NIC_CLASSES:
            raise UsageError(f"NIC class {self.nic_class!r} does not exist; use one of {', '.join(NIC_CLASSES)}")
        if self.transport not in TRANSPORTS:
            raise UsageError(f"transport {self.transport!r} does not exist; use one of {', '.join(TRANSPORTS)}")
        rails = 1 if self.max_rails is None else self.max_rails
        if not 1 <= rails <= MAX_RAILS:
            raise UsageError(f"max_rails={rails} is not possible; it must be from 1 to {MAX_RAILS}")
        if not 1 <= self.streams <= MAX_RAILS // rails:
            raise UsageError(
                f"streams={self.streams} is not possible; it must be from 1 to {MAX_RAILS // rails} "
                f"(rails times streams: at most {MAX_RAILS})"
            )
        if any(not name for name in names):
            raise UsageError(f"names={names!r} has an empty name; leave it out")
        if self.subnet is not None:
            try:
                ipaddress.ip_network(self.subnet)
            except ValueError as error:
                raise UsageError(f"subnet {self.subnet!r} is no network ({error}); write it as '10.1.0.0/16'") from None

    @classmethod
    def parse(cls, text: str, transport: str = "auto") -> NicSelection:
        """Reads a comma-separated list of "class:roce", "subnet:10.1.0.0/16", "rails:2", "streams:2", "fastest", names.

        Local.
        Names are as in the constructor: "eth1,eth2", "mlx5_*", "mlx5_0:1". Raises UsageError on a wrong value.
        """
        names: list[str] = []
        named: dict[str, str] = {}
        fastest = False
        for word in filter(None, map(str.strip, text.split(","))):
            key, colon, value = word.partition(":")
            if colon and key in ("class", "subnet", "rails", "streams"):
                if named.setdefault(key, value) != value:
                    raise UsageError(
                        f"NIC selection {text!r} has two of {key!r}: {named[key]!r} and {value!r}; keep one"
                    )
            elif word == "fastest":
                fastest = True
            else:
                names.append(word)
        for key in ("rails", "streams"):
            if key in named and not named[key].isdecimal():
                raise UsageError(f"NIC selection {text!r}: {key}:{named[key]} is no number; write it as '{key}:2'")
        rails = int(named["rails"]) if "rails" in named else None
        streams = int(named.get("streams", "1"))
        return cls(tuple(names), named.get("class"), fastest, named.get("subnet"), transport, rails, streams)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> NicSelection:
        """The selection of HOLMES_NICS (as `parse` reads it) and HOLMES_TRANSPORT, for scripts that cannot be edited.

        Local. `env`: None means os.environ. Raises UsageError on a wrong value.
        """
        env = os.environ if env is None else env
        return cls.parse(env.get("HOLMES_NICS", ""), env.get("HOLMES_TRANSPORT") or "auto")

    @property
    def restricts(self) -> bool:
        """Whether a class, a name or a subnet is asked for."""
        return self.nic_class is not None or bool(self.names) or self.subnet is not None

    def resolve(self, nics: Iterable[Nic]) -> list[Nic]:
        """The NICs among `nics` (of this host) that the selection allows and that TCP can use: up, with an address.

        Local. With a subnet, each NIC's first address lies in it. Link-local addresses count only where a subnet asks
        for them. Loopback is left out unless it is asked for. Raises NicError where an asked-for NIC does not exist,
        is down or has no address; without a condition the result may be empty.
        """
        nics = list(nics)
        found = self.matching(nics)
        up = [nic for nic in found if nic.is_netdev_up]
        self._require(up, nics, _each(found, _why_down), found)
        if self.subnet is None:
            usable = [nic.with_address(address) for nic in up if (address := _global_address(nic))]
            self._require(usable, nics, _each(up, _why_unaddressed), up)
            return usable
        usable = [nic.with_address(address) for nic in up if (address := _address_in(nic, self.subnet))]
        self._require(usable, nics, f"no NIC{self._called()} that is up has an address in subnet {self.subnet}", up)
        return usable

    def matching(self, nics: Iterable[Nic]) -> list[Nic]:
        """The NICs among `nics` with a name and class that the selection allows, in any state.

        Local. Loopback is left out unless something is asked for. Raises NicError where an asked-for NIC does not
        exist.
        """
        nics = list(nics)
        found = [nic for nic in nics if nic.nic_class != "loopback" or self.restricts]
        if self.names:
            found = [nic for nic in found if any(_has_name(nic, name) for name in self.names)]
            self._require(found, nics, f"no NIC is called {' or '.join(map(repr, self.names))}")
        if self.nic_class is not None:
            found = [nic for nic in found if nic.nic_class in NIC_CLASSES[self.nic_class]]
            self._require(found, nics, f"no NIC{self._called()} is of class {self.nic_class!r}")
        return found

    def _called(self) -> str:
        return f" called {' or '.join(map(repr, self.names))}" if self.names else ""

    def _require(self, found: list[Nic], nics: list[Nic], problem: str, rejected: Iterable[Nic] = ()) -> None:
        if found or not self.restricts:
            return
        nic = next((nic.name for nic in rejected), self.names[0] if self.names else "")
        raise NicError(
            f"{problem}. This host has: {'; '.join(map(summarize, nics)) or 'no NIC at all'}. Fix: choose an interface "
            "that is up and has an address, with NicSelection(...) or HOLMES_NICS (`holmes nics` lists them)",
            host=host_name(),
            nic=nic,
        )


def summarize(nic: Nic) -> str:
    """One NIC in a few words: "ib0 = mlx5_0:1 (infiniband, active, 10.1.0.1/24)"."""
    port = f" = {nic.port_name}" if nic.port_name and nic.port_name != nic.name else ""
    state = nic.state if nic.is_netdev_up or not nic.netdev or not nic.is_up else f"{nic.state}, {nic.netdev} is down"
    return f"{nic.name}{port} ({', '.join([nic.nic_class, state, *nic.addresses[:1]])})"


def is_link_local(address: str) -> bool:
    """Whether `address` (with or without prefix length) is valid on one link only."""
    return ipaddress.ip_interface(address).is_link_local


def _has_name(nic: Nic, pattern: str) -> bool:
    # A VLAN shares its parent's port: the port's name means the parent.
    own = (nic.name, nic.netdev) if nic.kind == "vlan" else (nic.name, nic.netdev, nic.hca, nic.port_name)
    return any(name and fnmatchcase(name, pattern) for name in own)


def _global_address(nic: Nic) -> str:
    return next((a.split("/")[0] for a in nic.addresses if not is_link_local(a)), "")


def _address_in(nic: Nic, subnet: str) -> str:
    network = ipaddress.ip_network(subnet)
    return next((a.split("/")[0] for a in nic.addresses if ipaddress.ip_interface(a).ip in network), "")


def _each(nics: Iterable[Nic], why: Callable[[Nic], str]) -> str:
    return ", ".join(f"NIC {nic.name} {why(nic)}" for nic in nics) or "no NIC is there"


def _why_down(nic: Nic) -> str:
    if not nic.netdev:
        return "has no network interface (load IPoIB or the Ethernet driver)"
    port = f"port {nic.port_name} is in state {nic.state!r}; " if nic.port_name and not nic.is_up else ""
    return f"is down ({port}check its cable, bring it up with `ip link set {nic.netdev} up`)"


def _why_unaddressed(nic: Nic) -> str:
    return f"has no address but link-local ones (give it one with `ip address add ... dev {nic.netdev}`)"
