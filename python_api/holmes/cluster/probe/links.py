"""What clusters have between them: one pair of hosts alone, then several at once, over their best common fabric."""

from __future__ import annotations

from holmes.cluster.probe.meter import Meeting, Meter
from holmes.cluster.probe.pairs import tournament
from holmes.cluster.topology import Link, Topology
from holmes.cluster.topology.measured import PairRate, rounded

_MOST_PAIRS = 8  # of two clusters at once: more would only load the machines


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
