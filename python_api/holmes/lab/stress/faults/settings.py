"""Settings of a run with faults."""

from __future__ import annotations

import random
from dataclasses import dataclass

from holmes_comm.errors import UsageError

#: Tensor and pipeline sizes that fit the built-in spec `stress` with two ranks on each node.
SIZES = ((2, 2), (1, 2), (2, 4), (1, 4))


@dataclass(frozen=True)
class FaultSettings:
    """Which faults, for how long, and which random choices.

    faults: names (see catalogue.FAULTS), chosen among at random; one episode is run for each before any comes again.
    seconds: how long new episodes are started. seed: of all choices; `episode`: only this one, to see it again.
    mixed: share of the episodes with two faults. timeout_s: deadline of an operation; connect_timeout_s: of a group's
    set-up. slack_s: how much later than the deadline a report may come. spec: testbed; nproc_per_node: ranks of a node.

    Raises ValueError where a value is not possible.
    """

    faults: tuple[str, ...]
    seconds: float = 240.0
    seed: int = 0
    episode: int | None = None
    mixed: float = 0.25
    max_bytes: int = 256 << 10
    timeout_s: float = 5.0
    connect_timeout_s: float = 12.0
    slack_s: float = 2.0
    spec: str = "stress"
    nproc_per_node: int = 2

    def __post_init__(self) -> None:
        if not self.faults:
            raise UsageError("no fault is chosen; say for example --faults kill,stop or --faults all")
        if self.seconds <= 0 or self.timeout_s <= 0 or self.connect_timeout_s <= 0:
            raise UsageError(
                f"seconds={self.seconds:g}, timeout_s={self.timeout_s:g} and connect_timeout_s="
                f"{self.connect_timeout_s:g} must be above 0"
            )
        if not 0 <= self.mixed <= 1:
            raise UsageError(f"mixed={self.mixed:g} must be from 0 to 1")

    @property
    def has_integrity(self) -> bool:
        """Whether the ranks compare what arrives with what was sent: with odd seeds."""
        return self.seed % 2 == 1

    def choice(self, episode: int) -> random.Random:
        """The random choices of one episode: of seed and number alone."""
        return random.Random(f"{self.seed}/{episode}")

    def order(self) -> list[str]:
        """The faults in the order in which they come first: all once, then again."""
        names = sorted(self.faults)
        random.Random(self.seed).shuffle(names)
        return names

    def replay_command(self, episode: int) -> str:
        """The command that makes the same episode again."""
        words = ["holmes stress --testbed --faults", ",".join(sorted(self.faults))]
        words += [f"--seed {self.seed} --episode {episode}"]
        if (self.timeout_s, self.slack_s) != (FaultSettings.timeout_s, FaultSettings.slack_s):
            words += [f"--timeout-s {self.timeout_s:g} --slack-s {self.slack_s:g}"]
        return " ".join(words)
