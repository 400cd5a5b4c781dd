"""Measures all fabrics within a given time: tournaments, then what they left open, then the clusters' links.

Every host is in at most one pair of a round, and never all pairs are tried.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

from holmes.cluster.probe.exchange import Exchange
from holmes.cluster.probe.meter import Meeting, Meter, slot_s
from holmes.cluster.probe.stream import Window
from holmes.cluster.topology import (
    ROUTED,
    Fabric,
    Host,
    Link,
    Pair,
    Topology,
    TopologyFinding,
    is_verbs_only,
    make_topology,
)
from holmes.cluster.topology.measured import (
    PairRate,
    measured_fabrics,
    pairs_of,
    parts_of,
    questions,
    rounded,
    slow_hosts,
)

_LEAST_S, _MOST_S = 0.12, 0.4  # of one direction's stream
_WARM_SHARE = 0.35
_MOST_PAIRS = 8  # of two clusters at once: more would only load the machines
Round = list[tuple[str, str]]
_EVERY_PAIR = 16  # up to so many hosts, every pair is worth its round


def measure_topology(
    exchange: Exchange,
    hosts: Sequence[Host],
    fabrics: Sequence[Fabric],
    findings: Sequence[TopologyFinding],
    measure_s: float,
    timeout_s: float,
) -> Topology:
    """Collective. The topology of these fabrics with their rates, parts and links between clusters.

    The tournaments take about `measure_s`, what they leave open and the links at most as much again; partners that do
    not come cost up to `timeout_s` for each of the three. Equal on all ranks.
    """
    by_id = {host.host_id: host for host in hosts}
    most_rounds = max(1, int(measure_s / (2 * _LEAST_S)))
    rounds = pack(_wishes(fabrics, by_id, most_rounds), most_rounds)
    stream_s = min(_MOST_S, max(_LEAST_S, measure_s / max(1, len(rounds)) / 2))
    window = Window(_WARM_SHARE * stream_s, (1 - _WARM_SHARE) * stream_s)
    half = max(1, int(measure_s / 2 / slot_s(window)))
    with Meter(exchange, hosts, window, timeout_s) as meter:
        pairs = _measured(meter, fabrics, rounds)
        open_questions = [[[pair] for pair in questions(fabric, pairs_of(fabric, by_id, pairs))] for fabric in fabrics]
        if any(open_questions):
            pairs += _measured(meter, fabrics, pack(open_questions, half))
        known = {fabric.name: pairs_of(fabric, by_id, pairs) for fabric in fabrics}
        measured = [part for fabric in fabrics for part in measured_fabrics(fabric, by_id, known[fabric.name])]
        found = make_topology(hosts, measured)
        links = measure_links(meter, found, half)
    # What many pairs at once left each other over a shared uplink is less than what one pair has.
    whole = {fabric.name for fabric in fabrics if len(parts_of(fabric, known[fabric.name])) > 1}
    final = [_from_links(fabric, links) if fabric.name in whole else fabric for fabric in measured]
    slow = [finding for fabric in fabrics for finding in slow_hosts(fabric, by_id, known[fabric.name])]
    return make_topology(hosts, final, [*findings, *slow], links, _host_pairs(by_id, known.values()))


def _host_pairs(hosts: Mapping[str, Host], pairs: Iterable[Iterable[PairRate]]) -> list[Pair]:
    """Each once, though two fabrics may have it."""
    found = {frozenset(pair.nics): pair for each in pairs for pair in each}
    return [
        Pair((hosts[one].name, hosts[other].name), (nic, peer), rounded(pair.gbps), rounded(pair.latency_s))
        for pair in found.values()
        for (one, nic), (other, peer) in [pair.nics]
    ]


def _from_links(fabric: Fabric, links: Sequence[Link]) -> Fabric:
    """A fabric between clusters, with the rates that one pair of hosts alone had on it."""
    mine = [link for link in links if link.fabric == fabric.name]
    if not mine:
        return fabric
    return dataclasses.replace(
        fabric,
        measured_gbps=statistics.median(link.gbps for link in mine),
        measured_min_gbps=min(link.gbps for link in mine),
        latency_s=statistics.median(link.latency_s for link in mine),
    )


def _wishes(fabrics: Sequence[Fabric], hosts: Mapping[str, Host], most_rounds: int) -> list[list[Round]]:
    """The rounds that each fabric would like; no pair of NICs twice, though it may lie in two fabrics."""
    seen: set[frozenset[tuple[str, str]]] = set()
    wishes = []
    for fabric in fabrics:
        subnet = {host_id: port.subnet for host_id in fabric.ports if (port := fabric.port_of(hosts[host_id]))}
        mine: list[Round] = []
        for pairs in tournament(tuple(fabric.ports), most_rounds):
            fresh: Round = []
            for one, other in pairs:
                nics = frozenset(((one, fabric.ports[one]), (other, fabric.ports[other])))
                if nics not in seen and (fabric.subnet != ROUTED or subnet[one] != subnet[other]):
                    seen.add(nics)
                    fresh.append((one, other))
            if fresh:
                mine.append(fresh)
        wishes.append(mine)
    return wishes


def _measured(
    meter: Meter, fabrics: Sequence[Fabric], rounds: Sequence[Sequence[tuple[int, str, str]]]
) -> list[PairRate]:
    meetings = [[(fabrics[index], one, other) for index, one, other in pairs] for pairs in rounds]
    return [pair for measured in meter.measure(meetings) for pair in measured]


def measure_links(meter: Meter, topology: Topology, most_rounds: int) -> list[Link]:
    """Collective. The links between clusters, in their order; a sample of them where there are many.

    Takes two rounds for each round of a tournament of the clusters, at most `most_rounds` in all, but at least two.
    """
    order = {cluster.name: place for place, cluster in enumerate(topology.clusters)}
    members = {
        cluster.name: [topology.host_named(name).host_id for name in cluster.hosts] for cluster in topology.clusters
    }
    links: list[Link] = []
    for pairs in tournament(list(order), max(1, most_rounds // 2)):
        crowds: dict[tuple[str, str], list[Meeting]] = {}
        for one, other in (sorted(pair, key=order.__getitem__) for pair in pairs):
            shared = topology.fabrics_between([*members[one], *members[other]])
            shared = tuple(fabric for fabric in shared if not is_verbs_only(fabric.subnet))
            if shared:
                meetings = [(shared[0], a, b) for a, b in zip(members[one], members[other], strict=False)]
                crowds[one, other] = meetings[:_MOST_PAIRS]
        if not crowds:
            continue
        alone = _by_hosts(meter.measure([[crowd[0] for crowd in crowds.values()]])[0])
        together = _by_hosts(meter.measure([[meeting for crowd in crowds.values() for meeting in crowd]])[0])
        for clusters, crowd in crowds.items():
            first = alone.get(frozenset(crowd[0][1:]))
            rates = [together[hosts].gbps for _, *both in crowd if (hosts := frozenset(both)) in together]
            if first is not None and len(rates) == len(crowd):
                numbers = (rounded(first.gbps), rounded(first.latency_s), len(crowd), rounded(sum(rates)))
                links.append(Link(clusters, crowd[0][0].name, *numbers))
    return sorted(links, key=lambda link: (order[link.clusters[0]], order[link.clusters[1]]))


def _by_hosts(pairs: list[PairRate]) -> dict[frozenset[str], PairRate]:
    return {frozenset(pair.hosts): pair for pair in pairs}


def tournament(members: Sequence[str], most_rounds: int) -> list[Round]:
    """Rounds of disjoint pairs: all pairs (circle method) where they fit, of up to 16 members, else a sample.

    The sample pairs members whose places differ in one bit. Over its log2 rounds that joins everybody with everybody
    else through few steps; near and far ones are compared in turn, as neighbours often share a switch.
    """
    count = len(members)
    if count <= min(_EVERY_PAIR, most_rounds + 1):
        rounds = _circle(members)
    else:
        bits = (count - 1).bit_length()
        order = [bit for low in range((bits + 1) // 2) for bit in dict.fromkeys((low, bits - 1 - low))]
        rounds = [
            [(members[i], members[i | 1 << bit]) for i in range(count) if not i & 1 << bit and i | 1 << bit < count]
            for bit in order
        ]
    # Alternate who connects, so that nobody only does or only waits.
    return [
        [pair if (index + place) % 2 == 0 else pair[::-1] for place, pair in enumerate(pairs)]
        for index, pairs in enumerate(rounds[:most_rounds])
    ]


def pack(wishes: Sequence[Sequence[Collection[tuple[str, str]]]], most_rounds: int) -> list[list[tuple[int, str, str]]]:
    """Rounds of several networks in as few common ones as their hosts allow, at most `most_rounds`.

    `wishes[n]` are the rounds of network n; the result's pairs carry n. The first rounds of all networks come first, so
    that a small limit leaves every network with some, then the rest of the largest one, which has most to show.
    """
    packed: list[list[tuple[int, str, str]]] = []
    busy: list[set[str]] = []
    order = [(0, network) for network, rounds in enumerate(wishes) if rounds]
    sizes = [sum(map(len, rounds)) for rounds in wishes]
    for network in sorted(range(len(wishes)), key=lambda network: -sizes[network]):
        order += [(depth, network) for depth in range(1, len(wishes[network]))]
    for depth, network in order:
        pairs = wishes[network][depth]
        hosts = {host for pair in pairs for host in pair}
        place = next((i for i, others in enumerate(busy) if others.isdisjoint(hosts)), len(packed))
        if place == len(packed):
            if place == most_rounds:
                continue
            packed.append([])
            busy.append(set())
        packed[place] += [(network, one, other) for one, other in pairs]
        busy[place] |= hosts
    return packed


def _circle(members: Sequence[str]) -> list[Round]:
    """Every pair once, in rounds of disjoint pairs: the first stays, the others turn around it."""
    seats: list[str | None] = [*members, *([None] if len(members) % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(one, other) for one, other in facing if one is not None and other is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds
