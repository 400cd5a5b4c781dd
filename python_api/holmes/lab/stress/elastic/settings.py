"""Sizes and times of the elastic jobs that faults are injected into: small and short, each episode is a whole job."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

RANKS = 3
STEPS, EVERY_STEPS, STEP_S = 140, 10, 0.05
LEASE_S = 2.0
#: Of Rules.
RULES: dict[str, Any] = {"lease_s": LEASE_S, "join_timeout_s": 30.0, "agree_timeout_s": 20.0, "whole_nodes": False}
#: Of run_elastic.
TIMES: dict[str, Any] = {"heartbeat_s": 0.25, "dead_after_s": 2.0, "timeout_s": 20.0}
#: Within this a job is done, whatever is injected; a lost store is given up after six leases.
EPISODE_S = 90.0


@dataclass(frozen=True)
class JobSettings:
    """What the ranks of one job are told. `rules`: of Rules, beside the number of ranks; `times`: of run_elastic."""

    ranks: int = RANKS
    steps: int = STEPS
    rules: dict[str, Any] = field(default_factory=lambda: dict(RULES))
    times: dict[str, Any] = field(default_factory=lambda: dict(TIMES))

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JobSettings:
        """The inverse."""
        return cls(**json.loads(text))
