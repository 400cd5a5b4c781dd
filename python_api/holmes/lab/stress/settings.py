"""Settings of a stress run; equal on all ranks."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from holmes_comm.errors import UsageError

KINDS = ("tp", "dp", "pp")
BUCKETS = 4  # of a data-parallel step
MICRO_BATCHES = 4  # of a pipeline step
LAYERS = 4  # all-reduces of a tensor step
OPERATIONS_PER_ROUND = 2 * max(BUCKETS, MICRO_BATCHES, LAYERS) + 1  # at most; the last one agrees on the end


@dataclass(frozen=True)
class Settings:
    """How long, how large, and which random choices.

    seconds: how long operations are started. seed: of all sizes, types and data. max_bytes: largest buffer.
    tensor: ranks of a tensor group; 0: two where every host has an even number of ranks, else one. pipeline: stages; 0:
    one for each cluster. first_round: number of the first round of each group, to begin where an earlier run failed.
    timeout_s: deadline of one operation. connect_timeout_s: of the set-up of a group; 0: as long. pause_s: rest after a
    round. corrupt: "KIND:ROUND:RANK", for tests of the check itself: there one value of
    a result is changed before it is looked at.

    Raises ValueError where a value is not possible.
    """

    seconds: float = 20.0
    seed: int = 0
    max_bytes: int = 4 << 20
    tensor: int = 0
    pipeline: int = 0
    first_round: int = 0
    timeout_s: float = 60.0
    connect_timeout_s: float = 0.0
    pause_s: float = 0.0
    corrupt: str = ""

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.timeout_s <= 0:
            raise UsageError(f"seconds={self.seconds:g} and timeout_s={self.timeout_s:g} must be above 0")
        if self.max_bytes < 1024:
            raise UsageError(f"max_bytes={self.max_bytes} must be 1024 or more")
        for name in ("seed", "tensor", "pipeline", "first_round"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)} must be 0 or more")
        if self.corrupt:
            kind, *numbers = self.corrupt.split(":")
            if kind not in KINDS or len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
                raise UsageError(f"corrupt={self.corrupt!r} must be KIND:ROUND:RANK with a kind of {', '.join(KINDS)}")

    @property
    def round_limit_s(self) -> float:
        """The longest that a round may take when every operation of it takes its whole deadline."""
        return OPERATIONS_PER_ROUND * self.timeout_s

    def is_corrupted(self, kind: str, round_number: int, rank: int) -> bool:
        """Whether the test hook strikes here."""
        return self.corrupt == f"{kind}:{round_number}:{rank}"

    def replay_command(self, round_number: int) -> str:
        """The command that makes the same operations again, from this round on."""
        words = ["holmes", "stress", "--seed", str(self.seed), "--first-round", str(round_number)]
        words += ["--max-bytes", str(self.max_bytes), "--seconds", f"{self.seconds:g}"]
        for name in ("tensor", "pipeline"):
            if getattr(self, name):
                words += [f"--{name}", str(getattr(self, name))]
        if self.corrupt:
            words += ["--corrupt", self.corrupt]
        return shlex.join(words)
