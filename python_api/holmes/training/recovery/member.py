"""Member: one process of the job, as the others know it, and which of them form a generation."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from holmes_comm.errors import UsageError


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
        """The inverse."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        """For messages."""
        return f"rank {self.place} on {self.node}"


def place_from(
    environment: Mapping[str, str], place: int | None = None, ranks: int | None = None
) -> tuple[int, int, str, int]:
    """(place, ranks of the job, node, ranks of the node); what is None by the launcher's variables.

    Raises UsageError where they are missing or no numbers.
    """
    try:
        place = int(environment["RANK"]) if place is None else place
        ranks = int(environment["WORLD_SIZE"]) if ranks is None else ranks
        node_ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"RANK, WORLD_SIZE and LOCAL_WORLD_SIZE say which process of the job this is, but: {error!r}; start it "
            "with a launcher that sets them, or give place= and rules="
        ) from None
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
