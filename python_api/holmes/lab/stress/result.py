"""What a stress run comes to: per rank, and over all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holmes_comm.errors import HolmesError


class WrongResultError(HolmesError):
    """An operation that ended without error gave wrong data. The message names operation, place, and both values."""


@dataclass(frozen=True)
class GroupResult:
    """What one rank did in one group: rounds, operations, bytes whose content was checked; bytes sent by NIC ("shm":
    shared memory) over the time `seconds`. `failure`: why it ended early, empty where it did not; `failed_round` then,
    and `lost_rank` where a lost peer is why: its rank in the job."""

    kind: str
    ranks: tuple[int, ...]
    rounds: int
    operations: int
    checked_bytes: int
    sent_bytes: Mapping[str, int]
    seconds: float
    failure: str = ""
    failed_round: int = 0
    is_wrong: bool = False
    lost_rank: int | None = None

    @property
    def is_aborted(self) -> bool:
        """Whether it only ended because something else had failed."""
        return self.failure.startswith("AbortedError")


@dataclass(frozen=True)
class RankResult:
    """All groups of one rank, which is on `host`; `failure`: what went wrong outside of a group's operations;
    `is_interrupted`: Ctrl-C or SIGTERM came before its time was over."""

    rank: int
    host: str
    groups: tuple[GroupResult, ...] = ()
    failure: str = ""
    is_interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankResult:
        """The inverse of `to_dict`."""
        groups = (GroupResult(**{**group, "ranks": tuple(group["ranks"])}) for group in data["groups"])
        return cls(**{**data, "groups": tuple(groups)})


@dataclass(frozen=True)
class StressResult:
    """All ranks' results, and the ranks that reported none. `nic_classes`: class by (host, NIC)."""

    ranks: tuple[RankResult, ...]
    missing: tuple[int, ...] = ()
    nic_classes: Mapping[tuple[str, str], str] = field(default_factory=dict)

    @property
    def is_interrupted(self) -> bool:
        """Whether it is of a part of its time only."""
        return any(rank.is_interrupted for rank in self.ranks)

    @property
    def failures(self) -> list[tuple[RankResult, GroupResult]]:
        """The groups that ended early: wrong results first, then lost and late peers, then what these ended.

        An interrupted rank may be gone before another one is: who lost it so, and what that ended, did not fail.
        """
        interrupted = {rank.rank for rank in self.ranks if rank.is_interrupted}
        found = [(rank, group) for rank in self.ranks for group in rank.groups if group.failure]
        found = [(rank, group) for rank, group in found if group.lost_rank not in interrupted]
        if interrupted and all(group.is_aborted for _, group in found):
            return []
        return sorted(found, key=lambda item: (not item[1].is_wrong, item[1].is_aborted))

    @property
    def exit_code(self) -> int:
        """0 where every rank reported and nothing failed, else 1."""
        return int(bool(self.missing or self.failures or any(rank.failure for rank in self.ranks)))
