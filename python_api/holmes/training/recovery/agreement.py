"""Agreement: everybody who is alive joins the next generation, and one decision says who is in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from holmes.training.recovery.errors import LeftOutError, ReplacedError, TooFewRanksError
from holmes.training.recovery.member import Member, choose
from holmes.training.recovery.rendezvous import GONE, Rendezvous
from holmes.training.recovery.watch import Liveness
from holmes.words import some

_log = logging.getLogger(__name__)
_LOOK_S = 0.05  # between two looks at the store while others are awaited
_DECIDERS = 8  # that look at everybody from the start: all who came would read as many values as ranks squared
_FIRST_WORD_S = 10.0  # a rank that waits so long says for whom, then each time that it has waited twice as long
_NAMED = 8  # ranks in such a word


@dataclass(frozen=True)
class Rules:
    """When a generation is decided.

    `first_ranks`: how many the first generation, or one after all were lost, waits for, until `join_timeout_s`. A later
    one waits for those that are alive, who have `agree_timeout_s` to leave the last one; who is silent for `silent_s`
    meanwhile is not waited for, once its lease is over: `lease_s` after it last reached the store a rank stops and
    writes nothing, and the others decide without it after half as much again. Equal on all ranks. `min_ranks`: fewer
    never train (None: more than half of `first_ranks`); a job that has fewer waits for others up to `wait_timeout_s`.
    `whole_nodes`: a host counts when all its processes are there. `blamed_generations`: a host that most others named
    lost in so many generations in a row is left out from then on, where `min_ranks` are left. `hung_after_s`: a process
    that has not left `train` so long after its generation failed is ended (exit status `watch.HUNG_STATUS`).
    """

    first_ranks: int
    min_ranks: int | None = None
    join_timeout_s: float = 300.0
    agree_timeout_s: float = 60.0
    wait_timeout_s: float = 3600.0
    silent_s: float = 2.0
    whole_nodes: bool = True
    lease_s: float = 5.0
    blamed_generations: int = 3
    hung_after_s: float = 300.0

    @property
    def least(self) -> int:
        """How many train at least."""
        return self.first_ranks // 2 + 1 if self.min_ranks is None else self.min_ranks

    @property
    def grace_s(self) -> float:
        """How long a rank may still hold its lease after its generation has ended, with a margin."""
        return 1.5 * self.lease_s


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
    ReplacedError, LeftOutError, StoreLostError.
    """
    is_announced = False
    while True:
        decision = _decide(rendezvous, me, generation, rules, check)
        if decision is None:
            return None
        if any(member.identity == me.identity for member in decision.members):
            return decision
        _check_replaced(me, decision)
        _check_left_out(rendezvous, me)
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
    previous = rendezvous.decision(generation - 1)
    if previous is not None and rendezvous.ended(generation - 1) is None:  # it runs: nothing to decide yet
        return Decision(generation - 1, previous)
    previous = previous or ()
    place = rendezvous.join(generation, me)
    _compare_rules(rendezvous, me, generation, rules)
    started_s = time.monotonic()  # later than the end of the last one: no rank's lease is renewed any more
    liveness = Liveness(rules.silent_s)
    next_word_s = _FIRST_WORD_S
    while True:
        check()
        if rendezvous.finished():
            return None
        decided = rendezvous.decision(generation)
        if decided is not None:
            return Decision(generation, decided)
        waited_s = time.monotonic() - started_s
        # Where those who came first die too, the next ones look, twice as many each time that a lease takes to end.
        if place > _DECIDERS * 2 ** min(waited_s / rules.grace_s, 30):
            time.sleep(_LOOK_S)
            continue
        joined = rendezvous.joined(generation)
        expected = {member.identity: member for member in [*previous, *rendezvous.waiting(), *joined]}
        beats = rendezvous.beats(list(expected))
        liveness.observe(beats)
        gone = {identity for identity, beat in beats.items() if beat == GONE}
        dead = gone.union(liveness.dead(expected))
        alive = [member for member in joined if member.identity not in dead]
        members = choose(alive, whole_nodes=rules.whole_nodes)
        here = {member.identity for member in joined}
        missing = expected.keys() - dead - here
        # Whoever has joined has left the last generation, whoever is gone too; the others may still write.
        is_safe = waited_s > rules.grace_s or all(member.identity in here | gone for member in previous)
        is_start = all(member.identity in dead for member in previous)  # the first generation, or all were lost
        timeout_s = rules.join_timeout_s if is_start else rules.agree_timeout_s
        is_complete = len(members) >= rules.first_ranks if is_start else not missing
        if (is_complete or waited_s > timeout_s) and is_safe and len(members) >= rules.least:
            for member in (expected[identity] for identity in missing):
                _log.warning(
                    "generation %d goes without %s, which lives, but has not left the last", generation, member
                )
            rendezvous.decide(generation, _without_blamed(rendezvous, generation, members, rules))
            continue
        if waited_s > timeout_s and len(members) < rules.least and rendezvous.run > 1 and not previous:
            return None  # the run before is done, and this process is none of a new one's
        if waited_s > timeout_s + rules.wait_timeout_s:
            raise TooFewRanksError(
                f"{len(members)} ranks are there for generation {generation}, at least {rules.least} are needed, "
                f"and no more came within {waited_s:.0f} s; start the lost ones again, or lower min_ranks"
            )
        if waited_s > next_word_s:
            next_word_s = 2 * waited_s
            slow = [expected[identity] for identity in missing]
            wanted = rules.first_ranks if is_start and waited_s <= timeout_s else rules.least
            _log.warning(
                "generation %d waits for %.0f s: %s; it gives up after %.0f s",
                *(generation, waited_s, _who_waits(alive, members, previous, slow, wanted, rules)),
                timeout_s + rules.wait_timeout_s,
            )
        time.sleep(_LOOK_S)


def _compare_rules(rendezvous: Rendezvous, me: Member, generation: int, rules: Rules) -> None:
    """Says so where those who joined this generation first go by other rules: whoever decides does so by its own."""
    own = f"first_ranks={rules.first_ranks}, min_ranks={rules.least}, whole_nodes={rules.whole_nodes}"
    first = rendezvous.settle(f"{generation}/rules", own)
    if first != own:
        _log.warning(
            "generation %d: %s has %s, but who joined it first has %s; they must be equal on all ranks, or it may "
            "begin with too few or wait for too many: give all the same rules= (without, WORLD_SIZE is first_ranks)",
            *(generation, me, own, first),
        )


def _who_waits(
    alive: Sequence[Member],
    members: Sequence[Member],
    previous: Sequence[Member],
    slow: Sequence[Member],
    wanted: int,
    rules: Rules,
) -> str:
    """Who is there for a generation that cannot be decided yet, and who is not."""

    there = {member.place for member in alive}
    parts = [f"{len(members)} of {wanted} ranks are there"]
    if members:
        parts[0] += f" ({some(members, _NAMED)})"
    if slow:
        parts.append(f"{some(slow, _NAMED)} lives, but has not left the last generation")
    late = {member.place for member in slow}
    lost = [member for member in previous if member.place not in there | late]
    if lost:
        parts.append(f"lost or ended, and not started again: {some(lost, _NAMED)}")
    places = {member.place for member in previous} | there | late
    never = [place for place in range(rules.first_ranks) if place not in places]
    if never and len(members) < wanted:
        parts.append(f"not there: RANK {some(never, _NAMED)} (not started, or another store or checkpoint folder)")
    chosen = {member.identity for member in members}
    for node in sorted({member.node for member in alive if member.identity not in chosen}):
        own = [member for member in alive if member.node == node]
        if rules.whole_nodes and len(own) < own[0].node_ranks:
            parts.append(
                f"host {node} does not count, as {len(own)} of its {own[0].node_ranks} processes are there "
                "(Rules(whole_nodes=False): each by itself)"
            )
    return "; ".join(parts)


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


def _without_blamed(
    rendezvous: Rendezvous, generation: int, members: tuple[Member, ...], rules: Rules
) -> tuple[Member, ...]:
    """`members` but for those of hosts that are left out, where enough train then: fewer would help nobody."""

    def without(nodes: Container[str]) -> tuple[Member, ...]:
        rest = tuple(member for member in members if member.node not in nodes)
        return rest if len(rest) >= rules.least else members

    left_out = rendezvous.left_out()
    first = generation - rules.blamed_generations
    always, number = rendezvous.culprits(generation - 1), generation - 2
    # A rank that was aborted before it found out blames nobody: two hosts may be alike in some of the generations.
    while always and number >= first:
        always, number = always & rendezvous.culprits(number), number - 1
    node = always.pop() if len(always) == 1 else None
    if node is not None and node not in left_out and without([node]) != members:
        reason = f"the other hosts lost it in each of the generations {first} to {generation - 1}"
        _log.error("host %s is left out: %s; mend its network or end it there", node, reason)
        rendezvous.leave_out(node, reason)
        left_out[node] = reason
    return without(left_out)


def _check_left_out(rendezvous: Rendezvous, me: Member) -> None:
    reason = rendezvous.left_out().get(me.node)
    if reason is not None:
        raise LeftOutError(
            f"{me} is left out of the job: {reason}; mend the host's network (`holmes doctor` on it), which is let in "
            "again when the job is started anew, or give the launcher another host"
        )


def _check_replaced(me: Member, decision: Decision) -> None:
    for other in decision.members:
        if other.place == me.place and other.identity > me.identity:
            raise ReplacedError(
                f"{me} was given up and another process started in its place ({other}), with which the job goes on; "
                "this one ends"
            )
