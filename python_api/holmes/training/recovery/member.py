"""Member: one process of the job, as the others know it, and which of them form a generation."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from holmes_comm.launch import recognize


@dataclass(frozen=True)
class Member:
    """One process. `identity`: its number in the order of arrival, never used twice.

    `place`: where it stands among the others, such as the rank its launcher gave it; a process that is started again in
    the place of a lost one has the same. `node`: its host. `node_ranks`: how many processes the host runs.
    """

    identity: int
    place: int
    node: str
    node_ranks: int = 1

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Member:
        """The inverse. Raises ValueError where this is no member."""
        if not isinstance(text, str):
            raise ValueError("no text")
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"no object of {', '.join(cls.__dataclass_fields__)}")
        if not isinstance(fields["node"], str):
            raise ValueError("node is no text")
        for name in ("identity", "place", "node_ranks"):
            if type(fields[name]) is not int or fields[name] < 0:
                raise ValueError(f"{name} is no whole number")
        return cls(**fields)

    def __str__(self) -> str:
        """For messages."""
        return f"rank {self.place} on {self.node}"


def place_from(
    environment: Mapping[str, str], place: int | None = None, ranks: int | None = None
) -> tuple[int, int, str, int]:
    """(place, ranks of the job, node, ranks of the node); what is None by the launcher's variables, and without a
    launcher this is a job of one process. Raises UsageError where they contradict each other."""
    launch = recognize(environment) if place is None or ranks is None else None
    place = (launch.rank if launch else 0) if place is None else place
    ranks = (launch.size if launch else 1) if ranks is None else ranks
    node_ranks = (launch.local_size if launch else None) or int(environment.get("LOCAL_WORLD_SIZE") or 1)
    return place, ranks, environment.get("HOLMES_HOSTNAME") or socket.gethostname(), node_ranks


def choose(present: Iterable[Member], *, whole_nodes: bool = True) -> tuple[Member, ...]:
    """Of those present the ones that form a generation, in the order of their ranks.

    One for each place, the latest to arrive; with `whole_nodes` only those of hosts all of whose processes are there.
    Ranks follow places, so that a process that comes back stands where the lost one stood, next to its cluster.
    """
    by_place: dict[int, Member] = {}
    for member in sorted(present, key=lambda member: member.identity):
        by_place[member.place] = member
    chosen = sorted(by_place.values(), key=lambda member: member.place)
    if whole_nodes:
        counts = Counter(member.node for member in chosen)
        chosen = [member for member in chosen if counts[member.node] >= member.node_ranks]
    return tuple(chosen)
