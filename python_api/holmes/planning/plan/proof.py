"""The proof that groups keep to their networks: tensor groups to a host, data-parallel groups to a cluster, and so on.

`check` takes a plan, or the groups that some trainer makes today, and a topology.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holmes.cluster.topology import Host, Topology
from holmes.planning.groups.rank_grid import KINDS, Ints, check_kind
from holmes.planning.groups.reach import Reach, Shared
from holmes.planning.groups.sizes import Limits, Sizes, fixes, problems
from holmes.planning.plan.plan import Plan
from holmes.words import short
from holmes_comm.errors import UsageError

GroupLists = Mapping[str, Sequence[Sequence[int]]]

_RULES = {"host": "on one host", "cluster": "in one cluster", "": "may cross clusters"}


@dataclass(frozen=True)
class Row:
    """What holds for the groups of one kind: how many, of how many ranks, on which networks, how many cross clusters,
    how many break the rule, the rule, and what these groups carry, which is why."""

    kind: str
    groups: int
    ranks: str
    networks: str
    crossing: int
    wrong: int
    rule: str
    why: str


@dataclass(frozen=True)
class Violation:
    """Groups that break their rule in the same way. `ranks`: those of the first one. `slowdown`: how many times slower
    than inside a cluster their network is; None where there is none to compare with, or a rate is unknown."""

    kind: str
    groups: int
    ranks: tuple[int, ...]
    problem: str
    slowdown: float | None = None


@dataclass(frozen=True)
class Proof:
    """A row for each kind, what violates the rules, and what would not. True where it `holds`."""

    rows: tuple[Row, ...]
    violations: tuple[Violation, ...]
    fix: str | None

    @property
    def holds(self) -> bool:
        """Whether nothing violates the rules."""
        return not self.violations

    def __bool__(self) -> bool:
        return self.holds

    def describe(self) -> str:
        """Lines for people: rows, violations with what they cost, and the fix."""
        lines = [
            f"{row.kind}: {row.groups} groups of {row.ranks}; {row.networks}; {row.rule} ({row.why}): "
            + (f"{row.wrong} do not" if row.wrong else "holds")
            + (f"; {row.crossing} cross clusters" if row.crossing else "")
            for row in self.rows
        ]
        lines += [
            f"WRONG {violation.kind}: {violation.groups} groups such as {short(violation.ranks)}: {violation.problem}"
            for violation in self.violations
        ]
        return "\n".join(lines + ([f"Fix: {self.fix}"] if self.fix else []))

    def require(self) -> None:
        """Raises one ValueError with all violations, what they cost and the fix, unless the proof holds."""
        if not self.holds:
            problems = "; ".join(
                f"{item.groups} {item.kind} groups such as {short(item.ranks)}: {item.problem}"
                for item in self.violations
            )
            raise UsageError(f"groups leave their networks: {problems}" + (f". Fix: {self.fix}" if self.fix else ""))


def check(groups: Plan | GroupLists, topology: Topology) -> Proof:
    """Verifies every group against the topology. Local; raises nothing for groups that are wrong: see `Proof.require`.

    `groups`: a plan, or lists of ranks by kind as a trainer made them, such as {"tp": [[0, 1], [2, 3]], "dp": [[0, 2],
    [1, 3]]}; kinds as in docs/groups.md. Raises ValueError for kinds and ranks that do not exist.
    """
    reach = Reach.of_topology(topology)
    if isinstance(groups, Plan):
        differs = plan_differs(groups, topology, reach)
        violations = [Violation(kind, count, ranks, problem) for kind, count, ranks, problem in differs]
        if groups.world_size != topology.world_size:
            return Proof((), tuple(violations), "make a plan for this topology")
        batches = {kind: [groups.groups(kind).ranks] for kind in groups.grid.kinds()}
    else:
        violations = []
        batches = _batches(groups, topology.world_size)
    rows = []
    for kind, arrays in batches.items():
        row, wrong = _check_kind(kind, arrays, reach)
        rows.append(row)
        violations += wrong
    if not violations:
        return Proof(tuple(rows), (), None)
    sizes = sizes_of({kind: arrays[0].shape[1] for kind, arrays in batches.items()}, topology.world_size)
    return Proof(tuple(rows), tuple(violations), nearest_fix(topology, sizes))


def _batches(groups: GroupLists, world_size: int) -> dict[str, list[Ints]]:
    """By kind, the groups of each length as one array; longest first."""
    if not any(groups.values()):
        raise UsageError("there are no groups to check; give lists of ranks by kind, such as {dp: [[0, 2], [1, 3]]}")
    found: dict[str, list[Ints]] = {}
    for kind, listed in groups.items():
        check_kind(kind)
        group_of: dict[int, Sequence[int]] = {}
        lengths: dict[int, list[Sequence[int]]] = {}
        for ranks in listed:
            if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0 or max(ranks) >= world_size:
                raise UsageError(
                    f"{kind} group {short(ranks)} must hold ranks of 0 to {world_size - 1}, each at most once"
                )
            for rank in ranks:
                if (other := group_of.setdefault(rank, ranks)) is not ranks:
                    raise UsageError(
                        f"{kind} groups {short(other)} and {short(ranks)} both hold rank {rank}; a rank must be in one "
                        "group of a kind"
                    )
            lengths.setdefault(len(ranks), []).append(ranks)
        if lengths:
            found[kind] = [np.array(lengths[length], dtype=np.int64) for length in sorted(lengths, reverse=True)]
    return found


def _check_kind(kind: str, arrays: Sequence[Ints], reach: Reach) -> tuple[Row, list[Violation]]:
    described = KINDS[kind]
    networks: Counter[str] = Counter()
    violations: list[Violation] = []
    crossing = wrong = 0
    for ranks in arrays:
        shared = reach.shared(ranks)
        crossing += int((shared.cluster < 0).sum())
        bad = ~shared.one_host & (shared.networks == 0)
        if described.within:
            bad |= ~shared.one_host if described.within == "host" else shared.cluster < 0
        wrong += int(bad.sum())
        violations += _violations(kind, ranks[bad], _select(shared, bad), reach)
        networks.update(_names(shared, reach))
    sizes = " or ".join(str(ranks.shape[1]) for ranks in arrays)
    named = ", ".join(name if len(networks) == 1 else f"{name}: {count}" for name, count in networks.items())
    count, rule = sum(map(len, arrays)), _RULES[described.within]
    row = Row(kind, count, f"{sizes} ranks", named, crossing, wrong, rule, described.why)
    return row, violations


def _select(shared: Shared, rows: np.ndarray) -> Shared:
    return Shared(*(column[rows] for column in shared))


def _names(shared: Shared, reach: Reach) -> Counter[str]:
    """The networks of groups, in words, each with the number of groups on it."""
    counts = Counter(zip(shared.one_host.tolist(), shared.networks.tolist(), strict=True))
    named: Counter[str] = Counter()
    for (one_host, networks), count in counts.items():
        rails = reach.rails(0 if one_host else networks)
        named["shared memory" if one_host else rails.reason if rails.networks else "no network"] += count
    return named


def _violations(kind: str, ranks: Ints, shared: Shared, reach: Reach) -> list[Violation]:
    """One for all groups that lie in the same clusters and share the same networks."""
    clusters = reach.cluster_of_host[reach.host_of[ranks]]
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for row, networks in enumerate(shared.networks.tolist()):
        alike.setdefault((networks, tuple(np.unique(clusters[row]).tolist())), []).append(row)
    found = []
    for (networks, numbers), rows in alike.items():
        problem, slowdown = _problem(kind, networks, numbers, reach)
        found.append(Violation(kind, len(rows), tuple(ranks[rows[0]].tolist()), problem, slowdown))
    return found


def _problem(kind: str, networks: int, clusters: Sequence[int], reach: Reach) -> tuple[str, float | None]:
    """What is wrong with a group in these clusters that shares these networks, and how many times slower it is."""
    where = " and ".join(reach.clusters[number].name for number in clusters[:4])
    where += f" and {len(clusters) - 4} more clusters" if len(clusters) > 4 else ""
    crosses = f"leaves its host, over {where}" if KINDS[kind].within == "host" else f"crosses {where}"
    rails = reach.rails(networks)
    if not rails.networks:
        return f"{crosses}, which share no network: it cannot communicate", None
    inside = [reach.rails(reach.shared_in_cluster(number)) for number in clusters]
    rates = [own.rate_gbps for own in inside if own.rate_gbps]
    text = f"{crosses}, so it runs on {rails.reason}"
    if len(clusters) == 1:
        return f"{text} instead of the host's own memory or NVLink", None
    if not rates or not rails.rate_gbps:
        return f"{text} instead of one cluster's own network (a rate is not known)", None
    slowdown = min(rates) / rails.rate_gbps
    own = next(own for own in inside if own.rate_gbps == min(rates))
    return f"{text} instead of {own.reason}: its bytes take {slowdown:.3g} times as long", slowdown


def sizes_of(size_of: Mapping[str, int], world_size: int) -> Sizes:
    """The parallel sizes that groups of these sizes by kind were made with; kinds that are not there count as 1."""
    tensor, context = size_of.get("tp", 1), size_of.get("cp", 1)
    data = size_of.get("dp", 1)
    pipeline = size_of.get("pp") or max(world_size // (tensor * context * data), 1)
    experts = "ep" in size_of or "expt_tp" in size_of
    return Sizes(tensor, context, pipeline, size_of.get("ep", 1), size_of.get("expt_tp", 1) if experts else None)


def nearest_fix(topology: Topology, sizes: Sizes) -> str:
    """In words, for groups of these sizes."""
    limits = Limits.of(topology)
    if not problems(limits, sizes):
        return (
            f"these sizes fit ({sizes.text()}), in another order of ranks: holmes.plan_for(topology, {sizes.text()}, "
            "...) gives it"
        )
    return "; or ".join(fixes(topology, limits, sizes))


Difference = tuple[str, int, tuple[int, ...], str]  # kind or "plan", groups or hosts, ranks, what is wrong


def plan_differs(plan: Plan, topology: Topology, reach: Reach) -> list[Difference]:
    """All differences: ranks on other hosts, NICs that a host does not have, groups on a network of another class."""
    if plan.world_size != topology.world_size:
        return [("plan", 1, (), f"it is for {plan.world_size} ranks, the topology has {topology.world_size}")]
    hosts = {host.ranks: host for host in topology.hosts}
    moved = [host for host in plan.hosts if host.ranks not in hosts]
    if moved:
        there = topology.host_of(moved[0].ranks[0]).name
        problem = f"ranks of {moved[0].name} are not those of one host of the topology (the first is on {there})"
        return [("plan", len(moved), moved[0].ranks, problem)]
    by_number = [hosts[host.ranks] for host in plan.hosts]
    return [*_nics(plan, by_number), *_networks(plan, reach)]


def _nics(plan: Plan, hosts: list[Host]) -> Iterator[Difference]:
    for network in plan.networks:
        classes = {network.nic_class} | ({"roce_v2", "roce_v1"} if network.nic_class == "ethernet" else set())
        for number, nic in network.nics.items():
            host = hosts[number]
            if not any(port.name == nic and port.nic_class in classes for port in host.ports):
                has = ", ".join(f"{port.name} ({port.nic_class})" for port in host.ports) or "no usable NIC"
                problem = f"host {host.name} has no NIC {nic} of class {network.nic_class}; it has {has}"
                yield ("plan", 1, host.ranks, problem)


def _networks(plan: Plan, reach: Reach) -> Iterator[Difference]:
    for kind in KINDS:
        if plan.grid.size_of(kind) == 1:
            continue
        ranks = plan.groups(kind).ranks
        ours, theirs = plan.reach.shared(ranks), reach.shared(ranks)
        pairs: dict[tuple[int, int], list[int]] = {}
        for row, pair in enumerate(zip(ours.networks.tolist(), theirs.networks.tolist(), strict=True)):
            if not ours.one_host[row]:
                pairs.setdefault(pair, []).append(row)
        for (planned, found), rows in pairs.items():
            plans, finds = plan.reach.rails(planned), reach.rails(found)
            if plans.nic_class != finds.nic_class:
                problem = f"planned on {plans.reason}, but the best network in the topology is {finds.reason}"
                yield (kind, len(rows), tuple(ranks[rows[0]].tolist()), problem)
