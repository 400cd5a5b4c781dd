"""Watch: a thread of each process that shows that it lives, and tells it when its generation has failed elsewhere.

The first rank of a generation watches all others and those that wait; the others watch the first. A rank on which an
operation fails says so in the store; every other rank's thread sees it and aborts what its rank waits for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from holmes.training.recovery.errors import StoreLostError
from holmes.training.recovery.member import Member, choose
from holmes.training.recovery.rendezvous import LEFT, Rendezvous

_log = logging.getLogger(__name__)


class Watch:
    """Start it once for a process; `follow` each generation. Thread safe.

    `rendezvous`: a connection of its own. A look every `heartbeat_s`. Where the store is lost, the thread says so in
    `lost_store` and ends: training goes on until somebody needs the store.
    """

    def __init__(
        self, rendezvous: Rendezvous, me: Member, heartbeat_s: float, dead_after_s: float, whole_nodes: bool = True
    ) -> None:
        self.lost_store: StoreLostError | None = None
        self._rendezvous, self._me = rendezvous, me
        self._heartbeat_s, self._dead_after_s = heartbeat_s, dead_after_s
        self._whole_nodes = whole_nodes
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._generation: int | None = None
        self._members: tuple[Member, ...] = ()
        self._on_failure: Callable[[], None] = lambda: None
        self._failure: str | None = None
        self._can_grow = False
        self._liveness = Liveness(dead_after_s)
        self._rendezvous.beat(me)
        self._thread = threading.Thread(target=self._run, name="holmes-recovery", daemon=True)
        self._thread.start()

    def follow(self, generation: int, members: Sequence[Member], on_failure: Callable[[], None]) -> None:
        """From now on watches this generation; calls `on_failure` on the thread, once, when it has failed elsewhere."""
        with self._lock:
            self._generation, self._members, self._on_failure = generation, tuple(members), on_failure
            self._failure, self._can_grow = None, False
            self._liveness = Liveness(self._dead_after_s)

    def leave(self) -> None:
        """Watches no generation: this rank has left it."""
        with self._lock:
            self._generation = None

    def failure(self) -> str | None:
        """Why the generation that is followed failed; None while it runs."""
        return self._failure

    def can_grow(self) -> bool:
        """Whether a generation made now would have other members, because somebody waits. On the first rank only."""
        return self._can_grow

    def raise_if_lost(self) -> None:
        """Raises StoreLostError where the thread has lost the store: the others take this process for dead."""
        if self.lost_store is not None:
            raise self.lost_store

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(self._heartbeat_s + 1)

    def _run(self) -> None:
        while not self._stop.wait(self._heartbeat_s):
            try:
                self._rendezvous.beat(self._me)
                with self._lock:
                    generation, members, on_failure = self._generation, self._members, self._on_failure
                    liveness = self._liveness
                if generation is None or self._failure is not None:
                    continue
                reason = self._look(generation, members, liveness)
                with self._lock:
                    if reason is None or generation != self._generation:
                        continue
                    self._failure = reason
                    on_failure()  # with the lock: this rank cannot begin the next generation meanwhile
            except StoreLostError as error:
                self.lost_store = error
                _log.warning("%s; training goes on, but a failure cannot be recovered from any more", error)
                return

    def _look(self, generation: int, members: Sequence[Member], liveness: Liveness) -> str | None:
        ended = self._rendezvous.ended(generation)
        if ended is not None and ended != LEFT:  # a boundary is left by all, each on its own
            return ended
        leads = members[0].identity == self._me.identity
        waiting = self._rendezvous.waiting() if leads else []
        watched = [*members, *waiting] if leads else [members[0]]
        liveness.observe(self._rendezvous.beats([member.identity for member in watched]))
        dead = set(liveness.dead(member.identity for member in watched))
        lost = [member for member in members if member.identity in dead]
        if lost:
            names = ", ".join(map(str, lost))
            return self._rendezvous.end(generation, f"no sign of life from {names} for {self._dead_after_s:g} s")
        if leads:
            alive = [member for member in watched if member.identity not in dead]
            best = choose(alive, whole_nodes=self._whole_nodes)
            self._can_grow = {m.identity for m in best} != {m.identity for m in members}
        return None


class Liveness:
    """Which processes' beats changed lately. One thread at a time.

    A process counts as alive for `dead_after_s` from the first time it is asked for, and from each change of its beat.
    """

    def __init__(self, dead_after_s: float) -> None:
        self.dead_after_s = dead_after_s
        self._last: dict[int, tuple[bytes, float]] = {}
        self._asked_s = time.monotonic()

    def observe(self, beats: Mapping[int, bytes]) -> None:
        """Takes the beats as they are now."""
        now_s = time.monotonic()
        if now_s - self._asked_s > self.dead_after_s / 2:
            # This process itself was stopped or starved meanwhile: it cannot tell who beat and who did not.
            self._last = {identity: (beat, now_s) for identity, (beat, _) in self._last.items()}
        self._asked_s = now_s
        for identity, beat in beats.items():
            known = self._last.get(identity)
            if known is None or known[0] != beat:
                self._last[identity] = (beat, now_s)

    def dead(self, identities: Iterable[int]) -> list[int]:
        """Those that were observed and have not beaten for `dead_after_s`."""
        now_s = time.monotonic()
        return [i for i in identities if i in self._last and now_s - self._last[i][1] > self.dead_after_s]
