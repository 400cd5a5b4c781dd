"""Connected parts of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def components(members: Sequence[str], edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The connected parts of a graph, each in the order of `members`, by their first member."""
    parent = {member: member for member in members}

    def root(member: str) -> str:
        while parent[member] != member:
            parent[member] = member = parent[parent[member]]
        return member

    for one, other in edges:
        parent[root(one)] = root(other)
    found: dict[str, list[str]] = {}
    for member in members:
        found.setdefault(root(member), []).append(member)
    return list(found.values())
