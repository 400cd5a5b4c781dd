"""The stage of an episode: which rank is where, which groups use which NIC, and the handles to break them by."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holmes.lab.stress.faults.folder_store import FolderStore
from holmes.lab.stress.faults.preloaded import FalseClock, FaultyCalls
from holmes.lab.stress.settings import KINDS
from holmes.lab.testbed import Process, Session
from holmes.planning.groups.group import Group
from holmes.planning.plan.plan import Plan


@dataclass
class Scene:
    """One episode's. `nodes[r]`: node of rank r; `processes[r]`: its process; `store`: the episode's own; `clocks`: of
    the ranks that have one of their own; `faulty_calls`: of those whose system calls can err. `records`: the folder of
    all ranks' flight records. `taken`: ranks and nodes that a fault has already.
    """

    session: Session
    plan: Plan
    nodes: Sequence[str]
    processes: Sequence[Process]
    store: FolderStore
    clocks: Mapping[int, FalseClock]
    faulty_calls: Mapping[int, FaultyCalls]
    records: Path
    has_integrity: bool
    taken: set[str | int] = field(default_factory=set)

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(len(self.nodes))

    @property
    def kept(self) -> int:
        """A rank whose process no fault ends: it shows what leaks over a whole run."""
        return len(self.nodes) // 2 - 1

    def free_ranks(self) -> list[int]:
        """Those that no fault has, on nodes that none has."""
        return [rank for rank in self.ranks if rank not in self.taken and self.nodes[rank] not in self.taken]

    def free_nodes(self) -> list[str]:
        """Nodes that no fault has, nor any of their ranks."""
        busy = {self.nodes[item] for item in self.taken if isinstance(item, int)} | self.taken
        return [node for node in dict.fromkeys(self.nodes) if node not in busy]

    def ranks_on(self, node: str) -> frozenset[int]:
        """The ranks of a node."""
        return frozenset(rank for rank in self.ranks if self.nodes[rank] == node)

    def groups(self) -> list[Group]:
        """All groups of more than one rank."""
        return [group for kind in KINDS for group in self.plan.groups(kind) if len(group.ranks) > 1]

    def groups_over(self, node: str, nic: str, other: str | None = None) -> list[Group]:
        """Groups in which a rank of `node` reaches other nodes (only `other`, where given) by this NIC."""
        found = []
        for group in self.groups():
            here = [rank for rank in group.ranks if self.nodes[rank] == node]
            there = [rank for rank in group.ranks if self.nodes[rank] != node and other in (None, self.nodes[rank])]
            if there and any(nic in group.nics.get(rank, ()) for rank in here):
                found.append(group)
        return found

    def nics_of(self, node: str) -> list[str]:
        """The interfaces of a node that a group uses, rails and the others."""
        return [nic.name for nic in self.session.spec.node(node).nics if self.groups_over(node, nic.name)]

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to a rank's process group."""
        self.processes[rank].kill(number, group=True)
