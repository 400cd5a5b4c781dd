"""Agreement: everybody who is alive joins the next generation, and one decision says who is in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from holmes.training.recovery.errors import ReplacedError, TooFewRanksError
from holmes.training.recovery.member import Member, choose
from holmes.training.recovery.rendezvous import Rendezvous
from holmes.training.recovery.watch import Liveness

_log = logging.getLogger(__name__)
_LOOK_S = 0.05  # between two looks at the store while others are awaited


@dataclass(frozen=True)
class Rules:
    """When a generation is decided.

    `first_ranks`: how many the first generation, or one after all were lost, waits for, until `join_timeout_s`. A later
    one waits for those that are alive, who have `agree_timeout_s` to leave the last one; who is silent for `silent_s`
    meanwhile is not waited for. `min_ranks`: fewer never train; a job that has fewer waits for others up to
    `wait_timeout_s`. `whole_nodes`: a host counts when all its processes are there.
    """

    first_ranks: int
    min_ranks: int = 1
    join_timeout_s: float = 300.0
    agree_timeout_s: float = 60.0
    wait_timeout_s: float = 3600.0
    silent_s: float = 2.0
    whole_nodes: bool = True


@dataclass(frozen=True)
class Decision:
    """Who is in generation `number`, in the order of ranks."""

    number: int
    members: tuple[Member, ...]


def agree(
    rendezvous: Rendezvous, me: Member, generation: int, rules: Rules, check: Callable[[], None]
) -> Decision | None:
    """Collective over those who are alive: the decision on `generation`, or on a later one; None: the job is done.

    A process that the decision leaves out, because it came too late or its host is not complete, waits for the next
    one. `check` is called now and then and may raise. Returns when this process is in. Raises TooFewRanksError,
    ReplacedError, StoreLostError.
    """
    is_announced = False
    while True:
        decision = _decide(rendezvous, me, generation, rules, check)
        if decision is None:
            return None
        if any(member.identity == me.identity for member in decision.members):
            return decision
        _check_replaced(me, decision)
        if not is_announced:
            rendezvous.wait_for_entry(me)
            is_announced = True
            _log.info("%s waits to be let in after generation %d", me, decision.number)
        if not _wait_for_end(rendezvous, decision, rules, check):
            return None
        generation = decision.number + 1


def next_generation(rendezvous: Rendezvous) -> int:
    """The generation that a process which has just started is to join: the one after the latest."""
    return rendezvous.latest() + 1


def _decide(
    rendezvous: Rendezvous, me: Member, generation: int, rules: Rules, check: Callable[[], None]
) -> Decision | None:
    previous = rendezvous.decision(generation - 1) or () if generation > 1 else ()
    is_late = generation > 1 and rendezvous.ended(generation - 1) is None
    if is_late:  # it runs: nothing to decide yet
        return Decision(generation - 1, previous)
    rendezvous.join(generation, me)
    started_s = time.monotonic()
    liveness = Liveness(rules.silent_s)
    while True:
        check()
        if rendezvous.finished():
            return None
        decided = rendezvous.decision(generation)
        if decided is not None:
            return Decision(generation, decided)
        joined = rendezvous.joined(generation)
        expected = {member.identity: member for member in [*previous, *rendezvous.waiting(), *joined]}
        liveness.observe(rendezvous.beats(list(expected)))
        dead = set(liveness.dead(expected))
        alive = [member for member in joined if member.identity not in dead]
        members = choose(alive, whole_nodes=rules.whole_nodes)
        missing = expected.keys() - dead - {member.identity for member in joined}
        waited_s = time.monotonic() - started_s
        is_start = all(member.identity in dead for member in previous)  # the first generation, or all were lost
        timeout_s = rules.join_timeout_s if is_start else rules.agree_timeout_s
        is_complete = len(members) >= rules.first_ranks if is_start else not missing
        if (is_complete or waited_s > timeout_s) and len(members) >= rules.min_ranks:
            rendezvous.decide(generation, members)
        elif waited_s > timeout_s + rules.wait_timeout_s:
            raise TooFewRanksError(
                f"{len(members)} ranks are there for generation {generation}, at least {rules.min_ranks} are needed, "
                f"and no more came within {waited_s:.0f} s; start the lost ones again, or lower min_ranks"
            )
        time.sleep(_LOOK_S)


def _wait_for_end(rendezvous: Rendezvous, decision: Decision, rules: Rules, check: Callable[[], None]) -> bool:
    """Waits until this generation has ended; False where the job is done; as long as it takes, if anybody lives."""
    liveness = Liveness(4 * rules.silent_s)
    identities = [member.identity for member in decision.members]
    while rendezvous.ended(decision.number) is None:
        check()
        if rendezvous.finished():
            return False
        liveness.observe(rendezvous.beats(identities))
        if len(liveness.dead(identities)) == len(identities):  # nobody is left who could say so
            rendezvous.end(decision.number, "none of its ranks gives a sign of life")
        time.sleep(4 * _LOOK_S)
    return not rendezvous.finished()


def _check_replaced(me: Member, decision: Decision) -> None:
    for other in decision.members:
        if other.place == me.place and other.identity > me.identity:
            raise ReplacedError(
                f"{me} was given up and another process started in its place ({other}), with which the job goes on; "
                "this one ends"
            )
