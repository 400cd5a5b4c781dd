"""What measured pairs say of a fabric: its rate, whether it is really several, and whose NIC is slow.

The rule, as docs/topology.md states it. A host's rate is the best of its pairs: a pair is as slow as its slower host.
Two hosts are joined where their pair has at least a third of the faster one's rate, and apart where it has less than a
third of the slower one's (in between, one host is slow, which says nothing of the wire). Joined hosts are a piece;
pieces are one fabric unless hosts of theirs are apart, measured twice. Then each such part is a fabric of its own, and
the whole one keeps what they have between each other. A host below half of its part's median, twice, is reported.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence

from holmes.cluster.topology.fabrics import components, make_fabric
from holmes.cluster.topology.parts import Fabric, Host, TopologyFinding
from holmes.cluster.topology.preference import ROUTED
from holmes.words import some

SPLIT_SHARE = 1 / 3
SLOW_SHARE = 1 / 2
_MOST_PIECES = 32


@dataclasses.dataclass(frozen=True)
class PairRate:
    """One measured pair of NICs, each a (host id, name). `gbps` of the slower direction; `latency_s` one way."""

    nics: tuple[tuple[str, str], tuple[str, str]]
    gbps: float
    latency_s: float
    host_limited: bool

    @property
    def hosts(self) -> tuple[str, str]:
        """The ids of the two hosts."""
        return self.nics[0][0], self.nics[1][0]


def pairs_of(fabric: Fabric, hosts: Mapping[str, Host], pairs: Iterable[PairRate]) -> list[PairRate]:
    """The pairs that were measured through NICs of this fabric; of a routed one those between two subnets.

    Of a pair measured twice the better one counts: a busy moment makes a wire look slower, nothing makes it faster.
    """
    best: dict[frozenset[tuple[str, str]], PairRate] = {}
    for pair in pairs:
        if all(fabric.ports.get(host_id) == nic for host_id, nic in pair.nics):
            known = best.get(frozenset(pair.nics))
            best[frozenset(pair.nics)] = pair if known is None or pair.gbps > known.gbps else known
    found = list(best.values())
    if fabric.subnet == ROUTED:
        subnet = {(host.host_id, port.name): port.subnet for host in hosts.values() for port in host.ports}
        found = [pair for pair in found if subnet[pair.nics[0]] != subnet[pair.nics[1]]]
    return found


def host_rates(pairs: Iterable[PairRate]) -> dict[str, float]:
    """Each host's rate in Gbit/s: the best of its pairs."""
    rates: dict[str, float] = {}
    for pair in pairs:
        for host_id in pair.hosts:
            rates[host_id] = max(rates.get(host_id, 0.0), pair.gbps)
    return rates


def parts_of(fabric: Fabric, pairs: Sequence[PairRate]) -> list[list[str]]:
    """The hosts of a fabric in the parts that the pairs show, largest first; one part where no pair says otherwise."""
    if fabric.subnet == ROUTED:
        return [list(fabric.ports)]
    rates = host_rates(pairs)
    pieces = _pieces(fabric, pairs, rates)
    number = {host_id: index for index, piece in enumerate(pieces) for host_id in piece}
    apart: dict[int, set[int]] = {index: set() for index in range(len(pieces))}
    best: dict[int, dict[int, float]] = {index: {} for index in range(len(pieces))}
    for pair in pairs:
        places = [number[host_id] for host_id in pair.hosts]
        for one, other in (places, places[::-1]):
            best[one][other] = max(best[one].get(other, 0.0), pair.gbps)
            if pair.gbps < SPLIT_SHARE * min(rates[host_id] for host_id in pair.hosts):
                apart[one].add(other)
    if not any(apart.values()):
        return [list(fabric.ports)]
    groups: list[set[int]] = []
    for index in sorted(range(len(pieces)), key=lambda i: -len(pieces[i])):
        # Where no pair says otherwise two pieces are one fabric: class and subnet say so.
        possible = [group for group in groups if apart[index].isdisjoint(group)]
        if possible:
            near = best[index]
            max(possible, key=lambda group: max((near[i] for i in near if i in group), default=0.0)).add(index)
        else:
            groups.append({index})
    order = {host_id: place for place, host_id in enumerate(fabric.ports)}
    return [sorted((h for index in group for h in pieces[index]), key=order.__getitem__) for group in groups]


def questions(fabric: Fabric, pairs: Sequence[PairRate]) -> list[tuple[str, str]]:
    """The pairs of hosts to measure next: parts with each other, slow hosts with a good one of each part.

    So nothing is called slow or apart that was measured only once.
    """
    rates = host_rates(pairs)
    if not rates or fabric.subnet == ROUTED:
        return []
    parts = parts_of(fabric, pairs)
    asked: list[tuple[str, str]] = []
    if len(parts) > 1:
        # Not only the parts, also the pieces that no slow pair kept from being put into one.
        pieces = [piece for piece in _pieces(fabric, pairs, rates) if piece[0] in rates]
        best = [max(piece, key=lambda host_id: rates.get(host_id, 0.0)) for piece in pieces[:_MOST_PIECES]]
        asked += itertools.combinations(best, 2)
    typical = statistics.median(rates.values())
    suspects = [host_id for host_id in fabric.ports if rates.get(host_id, typical) < SLOW_SHARE * typical]
    for part in parts:
        good = [host_id for host_id in part if rates.get(host_id, 0.0) >= SLOW_SHARE * typical]
        asked += zip(suspects, itertools.cycle(good), strict=False)
    return list(dict.fromkeys(asked))


def measured_fabrics(fabric: Fabric, hosts: Mapping[str, Host], pairs: Sequence[PairRate]) -> list[Fabric]:
    """The fabric with its rates; where it has parts, each of two and more hosts as well, before the whole."""
    if not pairs:
        return [fabric]
    parts = parts_of(fabric, pairs)
    if len(parts) == 1:
        return [_with_rates(fabric, pairs)]
    found = []
    order = {host_id: place for place, host_id in enumerate(fabric.ports)}
    shared = sorted((part for part in parts if len(part) > 1), key=lambda part: order[part[0]])
    for index, part in enumerate(shared, start=1):
        ports = {host_id: port for host_id in part if (port := fabric.port_of(hosts[host_id])) is not None}
        name = f"{fabric.name} part {index}"
        inside = [pair for pair in pairs if ports.keys() >= set(pair.hosts)]
        found.append(_with_rates(make_fabric(name, fabric.nic_class, fabric.subnet, ports, confirmed=True), inside))
    place = {host_id: index for index, part in enumerate(parts) for host_id in part}
    between = [pair for pair in pairs if place[pair.hosts[0]] != place[pair.hosts[1]]]
    # What keeps them apart is not their processors, which carried three times as much inside their parts.
    return [*found, dataclasses.replace(_with_rates(fabric, between), host_limited=False)]


def slow_hosts(fabric: Fabric, hosts: Mapping[str, Host], pairs: Sequence[PairRate]) -> list[TopologyFinding]:
    """A finding for each host far below the others of its part, or one where all are far below the line rate."""
    findings = []
    for part in parts_of(fabric, pairs):
        members = set(part)
        inside = [pair for pair in pairs if members.issuperset(pair.hosts)]
        rates = host_rates(inside)
        if not rates:
            continue
        median = statistics.median(rates.values())
        for host_id, rate in sorted(rates.items()):
            if rate < SLOW_SHARE * median:
                findings.append(
                    TopologyFinding(
                        "slow",
                        hosts[host_id].name,
                        fabric.ports[host_id],
                        f"{rate:.3g} Gbit/s, {rate / median:.2g} of the others' {median:.3g} on {fabric.name}",
                        "look for a bad cable or port, a link that came up slow (ethtool, ibstat), or other traffic",
                    )
                )
        ports = [fabric.port_of(hosts[host_id]) for host_id in rates]
        speeds = [port.speed_gbps for port in ports if port is not None and port.speed_gbps]
        limited = statistics.median(pair.host_limited for pair in inside) >= 0.5
        if speeds and median < SLOW_SHARE * min(speeds) and not limited:
            names = [hosts[host_id].name for host_id in rates]
            findings.append(
                TopologyFinding(
                    "below line rate",
                    some(names),
                    some(dict.fromkeys(fabric.ports[host_id] for host_id in rates)),
                    f"{median:.3g} Gbit/s on {fabric.name}, {median / min(speeds):.2g} of the line rate of "
                    f"{min(speeds):g}, and not for want of processors",
                    "look for a slower link or other traffic between these hosts; plans use the measured rate",
                )
            )
    return findings


def _pieces(fabric: Fabric, pairs: Sequence[PairRate], rates: Mapping[str, float]) -> list[list[str]]:
    joined = (p.hosts for p in pairs if p.gbps >= SPLIT_SHARE * max(rates[host_id] for host_id in p.hosts))
    return components(list(fabric.ports), joined)


def _with_rates(fabric: Fabric, pairs: Sequence[PairRate]) -> Fabric:
    if not pairs:
        return fabric
    return dataclasses.replace(
        fabric,
        measured_gbps=rounded(statistics.median(pair.gbps for pair in pairs)),
        measured_min_gbps=rounded(min(pair.gbps for pair in pairs)),
        latency_s=rounded(statistics.median(pair.latency_s for pair in pairs)),
        host_limited=statistics.median(pair.host_limited for pair in pairs) >= 0.5,
    )


def rounded(value: float) -> float:
    """Three digits: more would be noise in a file that people read."""
    return float(f"{value:.3g}")
