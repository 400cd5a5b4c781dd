"""The order of networks and the rails among them: topologies and groups ask the engine's one rule (docs/nics.md)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from holmes_comm import _C

ROUTED = "routed"  # in place of a subnet: several subnets joined by gateways
VERBS = (
    "GID "  # begins what is in place of a subnet where ports have no IP address: "GID fe80::/64", their GIDs' prefix
)


def is_verbs_only(subnet: str) -> bool:
    """Whether only verbs reach ports of this network."""
    return subnet.startswith(VERBS)


class Rated(Protocol):
    """What decides the place of a network: a fabric has it, and a plan's network."""

    @property
    def nic_class(self) -> str:
        """One of NIC_CLASSES."""

    @property
    def subnet(self) -> str:
        """The wire, or ROUTED."""

    @property
    def rate_gbps(self) -> float | None:
        """The rate to plan with; None: unknown."""


Network = TypeVar("Network", bound=Rated)


def best_first(
    networks: Sequence[Network],
    nics_of: Callable[[Network], Mapping[Any, str]],
    is_child: Callable[[Network], bool],
    *,
    same_hosts: bool,
) -> list[list[Network]]:
    """The networks, best first, each with those that serve a group together with it, itself the first.

    `nics_of` maps the hosts of a network to the names of their NICs in it; no two rails go through one. `is_child`:
    some host is in it through a NIC that shares another one's wire (a VLAN): no rail beside any other, as is a network
    that only verbs reach (they use one port). `same_hosts`:
    only networks of the same hosts are rails; else the hosts that matter are in all of them. Of equal networks the one
    given first comes first.
    """
    number: dict[Hashable, int] = {}

    def numbered(value: Hashable) -> int:
        return number.setdefault(value, len(number))

    shared = []
    for index, network in enumerate(networks):
        nics = nics_of(network)
        child = is_child(network) or is_verbs_only(network.subnet)
        hosts = numbered(("child", index) if child else frozenset(nics) if same_hosts else "all")
        # One network alone has nothing to share a NIC with.
        wires = [numbered(nic) for nic in nics.items()] if len(networks) > 1 else []
        shared.append(_shared(network, child, hosts, len(nics), wires))
    return [[networks[i] for i in rails] for rails in _C.best_first(shared)]


def are_alike(one: Rated, other: Rated) -> bool:
    """True where both are of one class and about one rate, so that one operation may be striped over them."""
    return _C.are_alike(_shared(one), _shared(other))


def _shared(
    network: Rated, is_child: bool = False, hosts: int = 0, size: int = 0, wires: Sequence[int] = ()
) -> _C.SharedNetwork:
    routed = network.subnet == ROUTED
    return _C.SharedNetwork(network.nic_class, routed, not is_child, network.rate_gbps, hosts, size, wires)
