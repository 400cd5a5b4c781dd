"""The membership protocol of docs/recovery.md as data: three ranks, cut, slow, stopped or restarted at any step.

A state holds what the store, the folder of checkpoints and each rank know; a step is one request of a rank to the
store, one check or write of the folder, a restart, or a tick of the clock. Any step may come late or never, also
between asking the store and taking its answer: a rank that never takes a step of the store is cut off from it, one
that takes none is stopped or killed. Searched breadth first, so that what is found is a shortest way to it.
"""

from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

LEASE = 2  # ticks that a lease lasts, from when the look that renewed it began
OLD = LEASE  # a clock stops here: it is over
GENERATIONS = 2  # that many are decided at most


class Rules(NamedTuple):
    """`lease`: a rank trains only while it holds one. `grace`: ticks that others wait, after the end of a generation,
    before they decide without a rank that has not left it. `token`: the folder refuses an earlier generation."""

    lease: bool
    grace: int
    token: bool


class Rank(NamedTuple):
    """`in_`: the generation it trains in, 0: none. `told`: the one whose decision with it in it may read, as late as it
    likes. `is_member`: of the latest decision. `waited`: it has left that and is there for the next, since so many
    ticks, -1: not. `asked`: ticks since the look under way began, -1: none; `answer`: what the store said, 1: it runs,
    0: it has ended, -1: nothing yet. `held`: ticks since the look that renewed the lease began. `armed`: it has checked
    that it may write, and writes next, however late."""

    in_: int = 0
    told: int = 0
    is_member: bool = False
    waited: int = -1
    asked: int = -1
    answer: int = -1
    held: int = OLD
    armed: bool = False


class State(NamedTuple):
    """`generation`: the latest that is decided; `has_ended`: and over. `lost`: some member of it is never heard of
    again. `claimed`, `written`: the latest generation that claimed the folder, and that wrote to it."""

    ranks: tuple[Rank, ...]
    generation: int = 1
    has_ended: bool = False
    lost: bool = False
    claimed: int = 0
    written: int = 0


def trains(rank: Rank, rules: Rules) -> bool:
    return rank.in_ > 0 and (not rules.lease or rank.held < LEASE)


def broken(state: State, rules: Rules) -> str | None:
    training = {rank.in_ for rank in state.ranks if trains(rank, rules)}
    return "two generations train" if len(training) > 1 else None


def steps(state: State, rules: Rules) -> Iterator[tuple[str, State | str]]:
    """What may happen next: (what, the state after it, or what is broken by it).

    The ranks are alike, so states that differ only in who is who are one: ranks are sorted.
    """
    yield "tick", state._replace(ranks=tuple(sorted(map(_older, state.ranks))))
    for index, rank in enumerate(state.ranks):
        if rank in state.ranks[:index]:  # whatever it does leads where that one does
            continue
        for what, after in _steps_of(state, rank, rules):
            if isinstance(after, str):
                yield f"{index}: {what}", after
                continue
            new, changes = after
            ranks = (*state.ranks[:index], new, *state.ranks[index + 1 :])
            if changes.pop("decides", False):
                out = changes.pop("without")
                ranks = tuple(_decided(other, changes["generation"], place == out) for place, other in enumerate(ranks))
            yield f"{index}: {what}", state._replace(ranks=tuple(sorted(ranks)), **changes)


def _decided(rank: Rank, generation: int, is_left_out: bool) -> Rank:
    """Who is there is in it, but for a rank of a host that is left out, which ends."""
    if is_left_out:
        return Rank()
    return rank._replace(is_member=False) if rank.waited < 0 else Rank(told=generation, is_member=True)


@cache
def _older(rank: Rank) -> Rank:
    if rank.answer == 1 and rank.asked + 1 >= OLD:  # too late to renew anything
        rank = rank._replace(asked=-1, answer=-1)
    return rank._replace(
        waited=min(rank.waited + 1, OLD) if rank.waited >= 0 else -1,
        asked=min(rank.asked + 1, OLD) if rank.asked >= 0 else -1,
        held=min(rank.held + 1, OLD),
    )


def _steps_of(state: State, rank: Rank, rules: Rules) -> Iterator[tuple[str, tuple | str]]:
    is_here = rank.waited >= 0
    if rank != Rank():  # killed, and another process started in its place, whom nobody knows yet
        yield "restarts", (Rank(), {"lost": state.lost or (rank.is_member and not is_here)})
    left = Rank(is_member=rank.is_member)
    if rank.in_:
        runs = rank.in_ == state.generation and not state.has_ended
        yield from _steps_of_training(rank, rules, runs, state.claimed, state.written)
    elif rank.told:
        yield "trains", (Rank(in_=rank.told, is_member=rank.is_member), {})
    if not rank.in_ and not is_here and state.has_ended and state.generation < GENERATIONS:
        yield "joins", (left._replace(waited=0), {})
    if is_here and state.has_ended and state.generation < GENERATIONS:
        absent = state.lost or any(other.is_member and other.waited < 0 for other in state.ranks)
        if not absent or rank.waited >= rules.grace:
            changes = {"generation": state.generation + 1, "has_ended": False, "lost": False, "decides": True}
            yield "decides", (rank, {**changes, "without": None})
            for place, other in enumerate(state.ranks):  # whoever is there, also who decides: blamed by the others
                if other.waited >= 0:
                    yield "decides without one", (rank, {**changes, "without": place})


@cache
def _steps_of_training(
    rank: Rank, rules: Rules, runs: bool, claimed: int, written: int
) -> tuple[tuple[str, tuple | str], ...]:
    """`runs`: its generation is the latest, and not over."""
    return tuple(_each_of_training(rank, rules, runs, claimed, written))


def _each_of_training(
    rank: Rank, rules: Rules, runs: bool, claimed: int, written: int
) -> Iterator[tuple[str, tuple | str]]:
    left = Rank(is_member=rank.is_member)
    if rank.asked < 0:
        yield "begins a look", (rank._replace(asked=0), {})
    elif rank.answer < 0:
        yield "is answered", (rank._replace(answer=int(runs)), {})
    elif rank.answer == 1:
        yield "renews its lease", (rank._replace(held=rank.asked, asked=-1, answer=-1), {})
    if rank.answer == 0 or (rules.lease and rank.held >= LEASE):
        yield "stops", (left, {})
    if runs:
        yield "ends the generation", (left, {"has_ended": True})
    if rank.armed:
        if rules.token and rank.in_ < claimed:
            yield "is refused by the folder", (left, {})
        elif rank.in_ < written:
            yield "writes", "an earlier generation writes after a later one"
        else:
            yield "writes", (rank._replace(armed=False), {"written": rank.in_})
    elif trains(rank, rules):
        yield "may write", (rank._replace(armed=True), {"claimed": max(claimed, rank.in_)})


def search(rules: Rules) -> tuple[str | None, list[str], int]:
    """(what can be broken, a shortest way there, number of states)."""
    start = State((Rank(in_=1, is_member=True, held=0),) * 3)
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    open_ = deque([start])
    while open_:
        state = open_.popleft()
        for what, after in steps(state, rules):
            if isinstance(after, str):
                return after, [*_way(came_from, state), what], len(came_from)
            if after not in came_from:
                if found := broken(after, rules):
                    return found, [*_way(came_from, state), what], len(came_from)
                came_from[after] = (state, what)
                open_.append(after)
    return None, [], len(came_from)


def _way(came_from: dict, state: State) -> list[str]:
    way = []
    while (step := came_from[state]) is not None:
        state, what = step
        way.append(what)
    return way[::-1]


@pytest.mark.parametrize(
    ("rules", "what", "last"),
    [
        pytest.param(Rules(lease=False, grace=1, token=False), "two generations train", "trains", id="neither"),
        pytest.param(Rules(lease=False, grace=2, token=True), "two generations train", "trains", id="no-lease"),
        pytest.param(Rules(lease=True, grace=1, token=True), "two generations train", "renews its lease", id="hasty"),
        pytest.param(Rules(lease=True, grace=2, token=False), "an earlier generation writes", "writes", id="no-token"),
    ],
)
def test_with_less_than_the_rules_two_generations_write(rules, what, last):
    found, way, _ = search(rules)
    assert found is not None
    assert what in found
    assert last in way[-1]


def test_with_the_rules_at_most_one_generation_writes():
    found, way, states = search(Rules(lease=True, grace=LEASE, token=True))
    assert found is None, way
    assert states > 50_000  # none of the steps above is shut out
