"""Watch: threads of each process that show that it lives, and tell it when its generation has failed elsewhere.

The first rank of a generation watches all others and those that wait; the others watch the first. A rank on which an
operation fails says so in the store; every other rank's thread sees it and aborts what its rank waits for.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

from holmes.training.recovery.errors import GenerationFailed, StoreLostError
from holmes.training.recovery.member import Member, choose
from holmes.training.recovery.rendezvous import LEFT, Rendezvous

_log = logging.getLogger(__name__)
#: Exit status of a process that hung in `train`: EX_TEMPFAIL of sysexits.h; another one in its place may do.
HUNG_STATUS = 75


class Watch:
    """Start it once for a process; `follow` each generation. Thread safe.

    `rendezvous`: a connection of its own. A look every `heartbeat_s`; one that finds the generation running renews this
    rank's lease, from when the look began. Without that for `lease_s`, because the store is lost, cut off or slow, or
    this process was stopped, the generation fails here: a thread of its own sees to it, as a look may hang. Where the
    store is lost, or holds what nobody of the job wrote, `lost_store` says so. Where this rank does not leave a
    generation `hung_after_s` after that failed, it hangs: the thread writes all stacks to stderr and ends the process
    with HUNG_STATUS, for the launcher.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        me: Member,
        heartbeat_s: float,
        dead_after_s: float,
        whole_nodes: bool = True,
        lease_s: float = 5.0,
        hung_after_s: float = 300.0,
    ) -> None:
        self.lost_store: StoreLostError | None = None
        self._rendezvous, self._me = rendezvous, me
        self._heartbeat_s, self._dead_after_s, self._lease_s = heartbeat_s, dead_after_s, lease_s
        self._whole_nodes, self._hung_after_s = whole_nodes, hung_after_s
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._generation: int | None = None
        self._members: tuple[Member, ...] = ()
        self._on_failure: Callable[[], None] = lambda: None
        self._failure: str | None = None
        self._failed_s = 0.0
        self._has_lease = False
        self._renewed_s = 0.0
        self._can_grow = False
        self._liveness = Liveness(dead_after_s)
        self._rendezvous.beat(me)
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._run, "holmes-recovery"), (self._guard, "holmes-lease"))
        ]
        for thread in self._threads:
            thread.start()

    def follow(self, generation: int, members: Sequence[Member], on_failure: Callable[[], None]) -> None:
        """From now on watches this generation; calls `on_failure` on a thread, once, when it has failed elsewhere."""
        with self._changed:
            self._generation, self._members, self._on_failure = generation, tuple(members), on_failure
            self._failure, self._can_grow = None, False
            # Whether it still runs is not known: this process may have been stopped since it read the decision.
            self._has_lease, self._renewed_s = False, _now_s()
            self._liveness = Liveness(self._dead_after_s)

    def leave(self) -> None:
        """Watches no generation: this rank has left it."""
        with self._changed:
            self._generation = None

    def failure(self) -> str | None:
        """Why the generation that is followed failed; None while it runs."""
        return self._failure

    def raise_if_failed(self) -> None:
        """Raises GenerationFailed once the generation has failed, or the lease is over, though no thread saw it yet."""
        with self._changed:
            self._check_lease()
            if self._failure is not None:
                raise GenerationFailed(self._failure)

    def hold_lease(self) -> None:
        """Returns while this rank holds its lease, waiting for the first of a generation; before anything is written.

        Raises GenerationFailed otherwise.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_lease or self._failure is not None, self._lease_s)
            self.raise_if_failed()
            if not self._has_lease:
                raise GenerationFailed("the lease on the store was not granted")

    def can_grow(self) -> bool:
        """Whether a generation made now would have other members, because somebody waits. On the first rank only."""
        return self._can_grow

    def raise_if_lost(self) -> None:
        """Raises StoreLostError where the thread has lost the store: the others take this process for dead."""
        if self.lost_store is not None:
            raise self.lost_store

    def close(self) -> None:
        """Ends the threads."""
        self._stop.set()
        for thread in self._threads:
            thread.join(self._heartbeat_s + 1)

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._heartbeat_s):
                self._beat()
        except StoreLostError as error:
            self.lost_store = error
        except Exception as error:  # of what another rank has put into the store, or of this process's memory
            _log.exception("the watch of %s ended", self._me)
            self.lost_store = StoreLostError(f"the watch over the store at {self._rendezvous.address} ended: {error!r}")

    def _beat(self) -> None:
        began_s = _now_s()
        self._rendezvous.beat(self._me)
        with self._changed:
            generation, members, liveness = self._generation, self._members, self._liveness
        if generation is None or self._failure is not None:
            return
        ended = self._rendezvous.ended(generation)
        reason = ended if ended is not None else self._look(generation, members, liveness)
        with self._changed:
            if generation != self._generation or self._failure is not None:
                return
            if reason is None:
                self._has_lease, self._renewed_s = True, began_s
                self._changed.notify_all()
            elif reason != LEFT:  # a boundary is left by all, each on its own
                self._fail(reason)

    def _guard(self) -> None:
        while not self._stop.wait(self._heartbeat_s / 2):
            with self._changed:
                self._check_lease()
                hung_s = self._hung_s()
            if hung_s >= self._hung_after_s:
                self._end_process(hung_s)

    def _hung_s(self) -> float:
        """With the lock. How long ago the generation failed that this rank has not left."""
        return _now_s() - self._failed_s if self._generation is not None and self._failure is not None else 0.0

    def _end_process(self, hung_s: float) -> NoReturn:
        text = (
            f"{self._me} hangs: it has not left generation {self._generation}, which failed {hung_s:.0f} s ago "
            f"({self._failure}); it ends with exit status {HUNG_STATUS}, its threads' stacks follow"
        )
        os.write(2, f"{text}\n".encode())
        faulthandler.dump_traceback(2)
        os._exit(HUNG_STATUS)

    def _check_lease(self) -> None:
        """With the lock."""
        silent_s = _now_s() - self._renewed_s
        if self._generation is not None and self._failure is None and silent_s >= self._lease_s:
            lost = f" ({self.lost_store})" if self.lost_store else ""
            self._fail(
                f"{self._me} has not reached the job's store at {self._rendezvous.address} for {silent_s:.1f} s{lost}: "
                f"its lease of {self._lease_s:g} s is over, so it stops and writes nothing; the others may go on "
                "without it"
            )

    def _fail(self, reason: str) -> None:
        """With the lock: this rank cannot begin the next generation meanwhile."""
        self._failure, self._failed_s = reason, _now_s()
        self._changed.notify_all()
        self._on_failure()

    def _look(self, generation: int, members: Sequence[Member], liveness: Liveness) -> str | None:
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


def _now_s() -> float:
    """Seconds that no change of the clock moves, and that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


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
