"""Peer: a library under test. A new one is one file with one subclass; nothing else needs to know it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holmes.tools.bench.operations import Array, Case
from holmes.tools.bench.timing import RoundTimes
from holmes_comm.errors import HolmesError


class PeerError(HolmesError):
    """A peer cannot be used here; the text says why and what to do."""


@dataclass(frozen=True)
class Context:
    """What a peer needs to connect its ranks. `store` has set, get and wait, and is shared by all ranks."""

    rank: int
    ranks: int
    store: Any
    timeout_s: float


class AnyPeer(ABC):
    """One library under test, a Peer or a SelfTimedPeer. Every method but `name` and `unsupported` is collective. Not
    thread-safe."""

    name: str
    #: Bounds of one round's calls: the lower gives every round a median.
    least_calls, most_calls = 2, 100_000

    @property
    def path(self) -> str:
        """What carries this rank's bytes, once the peer is set up: "shm", "tcp", "shm+tcp"; "-" where none do."""
        return "-"

    @abstractmethod
    def setup(self, context: Context) -> None:
        """Connects the ranks. Raises PeerError where the library cannot be used."""

    def unsupported(self, case: Case) -> str | None:
        """Returns why the peer cannot do `case`, None where it can; the same on every rank."""
        return None

    def describe(self) -> dict[str, Any]:
        """Returns facts for the JSON output: version, connections, NICs."""
        return {}

    @abstractmethod
    def teardown(self) -> None:
        """Disconnects the ranks."""


class Peer(AnyPeer):
    """One whose calls are made, timed and checked here."""

    @abstractmethod
    def prepare(self, case: Case, source: Array, output: Array) -> Callable[[], None]:
        """Returns a call that does the operation once on these 1-D host arrays and returns when it is complete."""


class SelfTimedPeer(AnyPeer):
    """One that times itself, in processes of its own: it moves no array of ours, so nothing of it is checked."""

    @abstractmethod
    def time_round(self, case: Case, calls: int) -> RoundTimes:
        """Returns the times of so many calls, the same on every rank. Raises PeerError, on every rank, where there are
        none."""
