"""The faults by name, each with a sentence and the function that chooses its victim and says what must follow."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holmes.lab.stress.faults.expect import Expectation
from holmes.lab.stress.faults.scene import Scene
from holmes.lab.stress.faults.settings import FaultSettings


@dataclass
class Injection:
    """One fault of one episode.

    what: a sentence. expect: see Expectation. tamper: what ranks do to themselves before the set-up (see tamper). act:
    breaks it, once the load runs; returns when it is broken. heal: mends it, after the episode. hold_s: how long the
    load has to live with it where nothing fails. ended: ranks whose process is gone, to be started again. silent:
    ranks that cannot report before `heal`.
    """

    fault: str
    what: str
    expect: Expectation
    tamper: dict[int, dict[str, Any]] = field(default_factory=dict)
    act: Callable[[], object] | None = None
    heal: Callable[[], object] | None = None
    hold_s: float = 2.0
    ended: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()


Choose = Callable[[Scene, random.Random], Injection | None]


@dataclass(frozen=True)
class Fault:
    """`choose` returns None where the scene has no place for it (every rank or node has a fault already).

    at_setup: it strikes before the groups are made, and comes alone. takes_paths: it takes paths between nodes; two of
    these at once could leave none of the rails, so they do not come together.
    """

    name: str
    text: str
    choose: Choose
    at_setup: bool = False
    takes_paths: bool = False


FAULTS: dict[str, Fault] = {}


def fault(name: str, text: str, *, at_setup: bool = False, takes_paths: bool = False) -> Callable[[Choose], Choose]:
    """Enters a function into the catalogue."""

    def enter(choose: Choose) -> Choose:
        FAULTS[name] = Fault(name, text, choose, at_setup, takes_paths)
        return choose

    return enter


def _load() -> None:
    from holmes.lab.stress.faults import link_faults, rank_faults, system_faults  # noqa: F401  (they enter themselves)


_load()


def choose_faults(settings: FaultSettings, episode: int, scene: Scene) -> list[Injection]:
    """One or two injections; empty where the scene has no place for the fault whose turn it is."""
    choice = settings.choice(episode)
    order = settings.order()
    first = FAULTS[order[episode % len(order)]]
    chosen = [first.choose(scene, choice)]
    if choice.random() < settings.mixed and not first.at_setup:
        others = [
            FAULTS[name]
            for name in order
            if name != first.name and not FAULTS[name].at_setup and not (first.takes_paths and FAULTS[name].takes_paths)
        ]
        if others:
            chosen.append(choice.choice(others).choose(scene, choice))
    return [injection for injection in chosen if injection is not None]
