"""Clocks: each host's against rank 0's, by questions and answers through the job's store, as NTP does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from holmes.cluster.probe import Exchange
from holmes.tools.doctor.facts import Clock, HostFacts

_QUESTIONS = 4  # the quickest answer counts


def compare_clocks(
    exchange: Exchange,
    store: Any,
    name: str,
    hosts: Sequence[HostFacts],
    now: Callable[[], float] = time.time,
) -> list[Clock]:
    """Collective. `name` must be new in the store. Rank 0 answers one host after another: a queue would look like skew.

    The offset is the answer's time minus the middle of question and answer; it is off by at most half their distance.
    """
    asking = [host for host in hosts if host.ranks[0] != 0]
    mine: list[tuple[str, float, float]] = []
    if exchange.rank == 0:
        for host in asking:
            prefix = f"{name}/{host.ranks[0]}"
            store.set(f"{prefix}/go", "")
            for number in range(_QUESTIONS):
                store.get(f"{prefix}/{number}/question")
                store.set(f"{prefix}/{number}/answer", repr(now()))
    for host in asking:
        if host.ranks[0] == exchange.rank:
            mine.append((host.name, *_ask(store, f"{name}/{exchange.rank}", now)))
    return [Clock(*clock) for clocks in exchange.all_gather(mine) for clock in clocks]


def _ask(store: Any, prefix: str, now: Callable[[], float]) -> tuple[float, float]:
    """This clock minus rank 0's, and by how much that may be wrong, in seconds."""
    store.get(f"{prefix}/go")
    best: tuple[float, float] | None = None
    for number in range(_QUESTIONS):
        asked_s = now()
        store.set(f"{prefix}/{number}/question", "")
        theirs_s = float(store.get(f"{prefix}/{number}/answer"))
        answered_s = now()
        error_s = abs(answered_s - asked_s) / 2
        if best is None or error_s < best[1]:
            best = ((asked_s + answered_s) / 2 - theirs_s, error_s)
    assert best is not None
    return best
