"""Faults of what a rank's system does to it, and of what a rank does to others: bits, threads, folders, messages."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from holmes.lab.stress.faults.catalogue import Injection, fault
from holmes.lab.stress.faults.expect import Expectation, about
from holmes.lab.stress.faults.scene import Scene

_ACTS_S = 3.0  # until a rank has done what it is to do to itself
_POLL_S = 0.02
_RELEASE_S = 0.05  # until who waits to open a FIFO has done so


@fault("flipped-bit", "a bit of what a rank receives is flipped behind TCP's checksum; with integrity (odd seeds)")
def flipped_bit(scene: Scene, choice: random.Random) -> Injection | None:
    """IntegrityError between the rank and the one that sent it; None where nobody would look, or no rank has it."""
    ranks = [rank for rank in scene.free_ranks() if rank in scene.faulty_calls]
    if not ranks or not scene.has_integrity:
        return None
    rank = choice.choice(ranks)
    scene.taken.add(rank)
    calls = scene.faulty_calls[rank]
    expect = Expectation(True, frozenset({"IntegrityError"}), lambda reporter, culprit: rank in (reporter, culprit))
    what = f"a bit of what rank {rank} on {scene.nodes[rank]} receives is flipped"

    def act() -> None:
        calls.set(flips=1)
        _wait(lambda: calls.flips_left == 0)

    return Injection("flipped-bit", what, expect, act=act, heal=lambda: calls.set())


@fault("no-threads", "a rank cannot start a thread any more, and another one is killed")
def no_threads(scene: Scene, choice: random.Random) -> Injection | None:
    """It reports the killed one as everybody does: a failure needs no new thread."""
    ranks = [rank for rank in scene.free_ranks() if rank in scene.faulty_calls]
    victims = [rank for rank in scene.free_ranks() if rank not in (scene.kept, *ranks)]
    if not ranks or not victims:
        return None
    rank, victim = choice.choice(ranks), choice.choice(victims)
    scene.taken |= {rank, victim}
    calls = scene.faulty_calls[rank]

    def act() -> None:
        calls.set(refuses_threads=True)
        scene.kill(victim)

    what = f"rank {rank} on {scene.nodes[rank]} gets no threads, and rank {victim} is killed"
    ended = frozenset({victim})
    return Injection("no-threads", what, about(ended), act=act, heal=lambda: calls.set(), ended=ended)


@fault("hung-folder", "a rank's folder of flight records hangs, as a dead NFS does, and another one is killed")
def hung_folder(scene: Scene, choice: random.Random) -> Injection | None:
    """It reports the killed one in time all the same: a record is written beside, not before."""
    victims = [rank for rank in scene.free_ranks() if rank != scene.kept]
    if len(victims) < 2:
        return None
    victim, rank = choice.sample(victims, 2)
    scene.taken |= {rank, victim}
    folder = scene.records

    def act() -> None:
        scene.store.set(f"hang/{rank}", b"")
        # A rank whose load another fault has ended already does not look.
        _wait(lambda: bool(_fifos(folder)))
        scene.kill(victim)

    what = f"rank {rank}'s folder of flight records hangs, and rank {victim} is killed"
    ended = frozenset({victim})
    return Injection("hung-folder", what, about(ended), act=act, heal=lambda: _release(folder), ended=ended)


@fault("unasked-messages", "a rank sends another one messages that it never asked for, without end")
def unasked_messages(scene: Scene, choice: random.Random) -> Injection | None:
    """MismatchError on the one that gets them, naming the other, once they are more than HOLMES_UNEXPECTED_BYTES.

    In shared memory the sender waits instead, until somebody's deadline is over.
    """
    rank = choice.choice(scene.free_ranks() or [-1])
    if rank < 0:
        return None
    scene.taken.add(rank)
    group = choice.choice([group for group in scene.groups() if rank in group.ranks])
    causes = frozenset({"MismatchError", "TimeoutError"})
    expect = Expectation(True, causes, lambda reporter, culprit: rank in (reporter, culprit))
    key = f"unasked/{group.kind}/{rank}"
    what = f"rank {rank} sends its {group.kind} group messages that nobody asked for"
    return Injection("unasked-messages", what, expect, act=lambda: scene.store.set(key, b""))


def _wait(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _ACTS_S
    while not condition() and time.monotonic() < end_s:
        time.sleep(_POLL_S)


def _fifos(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.part") if path.is_fifo()]


def _release(folder: Path) -> None:
    """Whoever waits in such a folder gets an error, and the folder is as before."""
    for path in _fifos(folder):
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        path.unlink()  # before its end: nobody opens it any more
        time.sleep(_RELEASE_S)
        os.close(reader)
