"""The faults of one episode, from seed and number alone (and from the plan, which follows from them)."""

from __future__ import annotations

from holmes.lab.stress.faults.catalogue import FAULTS, Injection
from holmes.lab.stress.faults.scene import Scene
from holmes.lab.stress.faults.settings import FaultSettings


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
