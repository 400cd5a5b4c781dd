"""Faults of NICs and of the network between nodes."""

from __future__ import annotations

import random
import time

from holmes.lab.stress.faults.catalogue import Injection, fault
from holmes.lab.stress.faults.expect import LOST, SURVIVED, Expectation
from holmes.lab.stress.faults.scene import Scene

_NOWHERE = "02:00:00:00:00:99"  # a MAC address that nobody has: frames to it vanish
_SLOW_GBPS = (0.02, 0.1)
_FLAP_DOWN_S, _FLAP_UP_S = (0.1, 0.7), 0.4
_RAIL_HOLD_S = 4.0  # a silent rail is given up after 2 s without an acknowledgement, sent twice


@fault("nic-down", "a NIC goes down and stays down", takes_paths=True)
def nic_down(scene: Scene, choice: random.Random) -> Injection | None:
    """A rail: the others carry on, with a warning. The only NIC of a group: the deadline, naming NIC and a side."""
    place = _choose_nic(scene, choice)
    if place is None:
        return None
    node, nic = place
    return Injection(
        "nic-down",
        f"{nic} of {node} goes down",
        _loss(scene, node, nic, None),
        act=lambda: scene.session.set_link(node, nic, up=False),
        heal=lambda: scene.session.set_link(node, nic, up=True),
        hold_s=_RAIL_HOLD_S,
    )


@fault("nic-flap", "a NIC goes down and up again a few times, each time for less than a second", takes_paths=True)
def nic_flap(scene: Scene, choice: random.Random) -> Injection | None:
    """The system sends again what was lost; a rail may be given up meanwhile."""
    place = _choose_nic(scene, choice)
    if place is None:
        return None
    node, nic = place
    downs_s = [choice.uniform(*_FLAP_DOWN_S) for _ in range(choice.randint(1, 3))]

    def act() -> None:
        for down_s in downs_s:
            scene.session.set_link(node, nic, up=False)
            time.sleep(down_s)
            scene.session.set_link(node, nic, up=True)
            time.sleep(_FLAP_UP_S)

    what = f"{nic} of {node} goes down {len(downs_s)} times, {max(downs_s):.1f} s at most"
    lossy = _loss(scene, node, nic, None)
    expect = Expectation(None if lossy.must_fail else False, LOST, lossy.is_named, lossy.nics)
    return Injection("nic-flap", what, expect, act=act, hold_s=_RAIL_HOLD_S)


@fault("nic-slow", "a NIC becomes 10 to 50 times as slow", takes_paths=True)
def nic_slow(scene: Scene, choice: random.Random) -> Injection | None:
    """Slow is not lost."""
    place = _choose_nic(scene, choice)
    if place is None:
        return None
    node, nic = place
    before = scene.session.spec.node(node).nic(nic).rate_gbps
    if before is None:
        return None
    rate_gbps = choice.uniform(*_SLOW_GBPS) * before
    return Injection(
        "nic-slow",
        f"{nic} of {node} falls from {before:g} to {rate_gbps:.3f} Gbit/s",
        SURVIVED,
        act=lambda: scene.session.set_rate(node, nic, rate_gbps),
        heal=lambda: scene.session.set_rate(node, nic, before),
        hold_s=3.0,
    )


@fault(
    "cut-pair",
    "two nodes no longer reach each other over one network, silently; all other paths stand",
    takes_paths=True,
)
def cut_pair(scene: Scene, choice: random.Random) -> Injection | None:
    """One rail: the others carry on, with a warning. The only NIC: the deadline, naming the two."""
    return _cut(scene, choice, "cut-pair", both_ways=True)


@fault("cut-one-way", "what one node sends to another over one network vanishes; the way back stands", takes_paths=True)
def cut_one_way(scene: Scene, choice: random.Random) -> Injection | None:
    """As cut-pair: what is not acknowledged did not arrive."""
    return _cut(scene, choice, "cut-one-way", both_ways=False)


def _cut(scene: Scene, choice: random.Random, name: str, *, both_ways: bool) -> Injection | None:
    spec = scene.session.spec
    places = [
        (node, nic, other)
        for node in scene.free_nodes()
        for nic in scene.nics_of(node)
        for other in scene.free_nodes()
        if other != node and scene.groups_over(node, nic, other)
    ]
    if not places:
        return None
    node, nic, other = choice.choice(places)
    scene.taken |= {node, other}
    network = spec.node(node).nic(nic).network
    far = spec.node(other).nic_on(network)
    assert far is not None, "a group joins the two over it"
    ends = [(node, nic, str(far.address.ip))]
    if both_ways:
        ends.append((other, far.name, str(spec.node(node).nic(nic).address.ip)))

    def act() -> None:
        for where, device, address in ends:
            command = ["ip", "neigh", "replace", address, "lladdr", _NOWHERE, "nud", "permanent", "dev", device]
            scene.session.exec(where, command)

    def heal() -> None:
        for where, device, address in ends:
            scene.session.exec(where, ["ip", "neigh", "del", address, "dev", device])

    arrow = "<->" if both_ways else "->"
    return Injection(
        name,
        f"{node} {arrow} {other} is cut over {nic}",
        _loss(scene, node, nic, other),
        act=act,
        heal=heal,
        hold_s=_RAIL_HOLD_S,
    )


def _choose_nic(scene: Scene, choice: random.Random) -> tuple[str, str] | None:
    places = [(node, nic) for node in scene.free_nodes() for nic in scene.nics_of(node)]
    if not places:
        return None
    node, nic = choice.choice(places)
    scene.taken.add(node)
    return node, nic


def _loss(scene: Scene, node: str, nic: str, other: str | None) -> Expectation:
    """Of the path by this NIC to all other nodes, or to `other`."""
    groups = scene.groups_over(node, nic, other)
    here = scene.ranks_on(node)
    railed = [group for group in groups if len(next(iter(group.nics.values()))) > 1]
    spec = scene.session.spec
    far = {n for n in scene.nodes if n != node and other in (None, n)}
    network = spec.node(node).nic(nic).network
    names = {nic} | {end.name for n in far if (end := spec.node(n).nic_on(network)) is not None}
    if len(railed) == len(groups):
        ends = [node] + [n for n in dict.fromkeys(scene.nodes) if any(_joins(scene, g, n, far) for g in railed)]
        warns = tuple((end, nic if end == node else _nic_on(scene, end, network)) for end in ends)
        return Expectation(must_fail=False, warns=warns)
    there = frozenset(rank for rank in scene.ranks if scene.nodes[rank] in far)

    def is_named(reporter: int, culprit: int) -> bool:
        return (reporter in here and culprit in there) or (reporter in there and culprit in here)

    return Expectation(True, LOST, is_named, frozenset(names))


def _joins(scene: Scene, group: object, node: str, far: set[str]) -> bool:
    ranks = getattr(group, "ranks", ())
    return node in far and any(scene.nodes[rank] == node for rank in ranks)


def _nic_on(scene: Scene, node: str, network: str) -> str:
    end = scene.session.spec.node(node).nic_on(network)
    assert end is not None, "its ranks are in a group that uses the network"
    return end.name
