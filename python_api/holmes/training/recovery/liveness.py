"""Liveness: who still beats. Beats are compared with each other only, so that hosts' clocks do not matter."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping


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
