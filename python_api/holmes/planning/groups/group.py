"""Groups: the ranks of each kind of group, the NICs that they use, and why. Made when asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from holmes.planning.groups.rank_grid import KINDS, RankGrid
from holmes.planning.groups.reach import Reach
from holmes.words import short
from holmes_comm.errors import UsageError


@dataclass(frozen=True)
class Group:
    """The ranks of one group, in group-rank order, the NIC names each of them uses, and why.

    `nics` maps a rank to its rails, in the same order on every rank; without entries the ranks share a host and use
    shared memory. `nic_class` is None then. `cluster_of` maps the ranks of a group that spans clusters to the name of
    theirs, `cluster_nics` to the NICs that they use inside it (none where those of its ranks are on one host); both are
    empty for a group within one cluster. `is_verbs_only`: the ports of `nics` have no IP address, so that only RDMA can
    use them; never of a group that spans clusters, which TCP joins (docs/rdma.md). `priority`: that of its kind, where
    the group spans clusters and the plan has stages, whose messages share what joins these (docs/wan.md); else None.
    `turn`: of a pipeline among those that take turns there.
    """

    kind: str
    ranks: tuple[int, ...]
    nics: Mapping[int, tuple[str, ...]]
    nic_class: str | None
    reason: str
    cluster_of: Mapping[int, str] = field(default_factory=dict)
    cluster_nics: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    is_verbs_only: bool = False
    priority: int | None = None
    turn: int | None = None


class Groups(Sequence[Group]):
    """All groups of one kind, in Megatron's order; each is made when it is asked for. Immutable; thread-safe."""

    def __init__(self, kind: str, grid: RankGrid, reach: Reach, turns: int | None = None) -> None:
        """`turns`: as of a plan."""
        self.kind = kind
        self.ranks = grid.groups(kind)
        self._reach = reach
        self._priority = KINDS[kind].priority if grid.pipeline > 1 else None
        self._turns = turns if kind == "pp" else None
        self._alike = grid.size_of("tp_cp")  # groups of one pipeline
        self._shared = reach.shared(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, index: int) -> Group: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Group]: ...

    def __getitem__(self, index: int | slice) -> Group | Sequence[Group]:
        """A group. Raises ValueError, naming hosts and their networks, where its ranks share none."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} groups of kind {self.kind}, but number {index} is asked for")
        ranks = tuple(self.ranks[index].tolist())
        if len(ranks) == 1:
            return Group(self.kind, ranks, {}, None, "one rank: no communication")
        hosts = self._reach.host_of[self.ranks[index]].tolist()
        if self._shared.one_host[index]:
            reason = f"all on host {self._reach.hosts[hosts[0]].name}: shared memory"
            return Group(self.kind, ranks, {}, None, reason)
        spans = self._shared.cluster[index] < 0
        networks = self._shared.networks[index]
        if spans:
            networks = self._reach.with_ip(networks) or networks
        rails = self._reach.rails(networks)
        if not rails.networks:
            raise UsageError(
                f"ranks {short(ranks)} of a {KINDS[self.kind].title} group share no network "
                f"({self._reach.describe_hosts(hosts)}); give all of these hosts a NIC in one subnet and check with "
                "`holmes topology` that it is reachable"
            )
        nics = {rank: self._reach.nics(networks, host) for rank, host in zip(ranks, hosts, strict=True)}
        reason = f"best network that all {len(ranks)} ranks share: {rails.reason}"
        if not spans:
            return Group(self.kind, ranks, nics, rails.nic_class, reason, is_verbs_only=rails.is_verbs_only)
        names, inside = self._inside_clusters(index, ranks)
        reason = f"spans clusters; {reason}"
        turn = None if self._turns is None else index // self._alike % self._turns
        return Group(self.kind, ranks, nics, rails.nic_class, reason, names, inside, priority=self._priority, turn=turn)

    def check_networks(self) -> None:
        """Raises ValueError for the first group whose ranks share no network."""
        alone = (self._shared.networks == 0) & ~self._shared.one_host
        if alone.any() and self.ranks.shape[1] > 1:
            self[int(alone.argmax())]

    def _inside_clusters(self, index: int, ranks: tuple[int, ...]) -> tuple[dict[int, str], dict[int, tuple[str, ...]]]:
        reach = self._reach
        hosts = reach.host_of[self.ranks[index]]
        clusters = reach.cluster_of_host[hosts]
        inside: dict[int, tuple[str, ...]] = {}
        for cluster in dict.fromkeys(clusters.tolist()):
            members = self.ranks[index][clusters == cluster]
            shared = reach.shared(members[None])
            for rank, host in zip(members.tolist(), reach.host_of[members].tolist(), strict=True):
                inside[rank] = () if shared.one_host[0] else reach.nics(reach.with_ip(shared.networks[0]), host)
        names = {rank: reach.clusters[i].name for rank, i in zip(ranks, clusters.tolist(), strict=True)}
        return names, {rank: inside[rank] for rank in ranks}
