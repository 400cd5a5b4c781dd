"""Autograd's graph of a stage, cut where ways to parameters leave the ways to the stage's inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.autograd.graph import Node

Children = Mapping[Node, Sequence[Node]]


@dataclass(eq=False)
class Group:
    """Parameters whose gradients are computed together, and where the gradients that reach them begin."""

    nodes: list[Node] = field(default_factory=list)  # on a way to an input, with another way to these parameters
    heads: list[int] = field(default_factory=list)  # roots from which no way leads to an input
    leaves: list[Node] = field(default_factory=list)  # the parameters' AccumulateGrad


def children_of(roots: Iterable[Node], ends: Iterable[Node]) -> dict[Node, list[Node]]:
    """All nodes that `roots` reach, each behind its children. The `ends` are taken to have none."""
    below: dict[Node, list[Node]] = {node: [] for node in ends}
    seen = set(below)
    for root in roots:
        waiting = [(root, False)]
        while waiting:
            node, is_done = waiting.pop()
            if is_done:
                below[node] = [child for child, _ in node.next_functions if child is not None]
            elif node not in seen:
                seen.add(node)
                waiting.append((node, True))
                waiting += [(child, False) for child, _ in node.next_functions if child is not None]
    return below


def groups_of(children: Children, roots: Sequence[Node], ends: Iterable[Node]) -> list[Group]:
    """The parameters by what they share: no node that leads to parameters of two groups lies off the ways to `ends`.

    `children`: as `children_of(roots, ends)` finds them.
    """
    leads = _leading_to(ends, children)
    sets = _Sets(children)
    for node, below in children.items():
        for child in below:
            if child not in leads:
                sets.join(node, child)
    groups: dict[Node, Group] = {}
    for node, below in children.items():
        group = groups.setdefault(sets.name(node), Group())
        if node not in leads and hasattr(node, "variable"):
            group.leaves.append(node)
        if node in leads and any(child not in leads for child in below):
            group.nodes.append(node)
    for index, root in enumerate(roots):
        if root not in leads:
            groups[sets.name(root)].heads.append(index)
    return [group for group in groups.values() if group.leaves]


def _leading_to(ends: Iterable[Node], children: Children) -> set[Node]:
    leads = set(ends)
    for node, below in children.items():
        if not leads.isdisjoint(below):
            leads.add(node)
    return leads


class _Sets:
    """Disjoint sets of nodes, each with one of them as its name."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._parent = {node: node for node in nodes}

    def name(self, node: Node) -> Node:
        while (parent := self._parent[node]) is not node:
            self._parent[node] = node = self._parent[parent]
        return node

    def join(self, one: Node, other: Node) -> None:
        self._parent[self.name(one)] = self.name(other)
