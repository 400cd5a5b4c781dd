"""The schedule for a job's distances: of each kind the warm-up with which a simulated step is shortest, within memory.

Over a round trip a stage that stops after 1F1B's few forwards waits for the first gradient. How many more cover it
follows from the round trip and a micro-batch's time; what that gains at the end of a step is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from holmes.planning.partition.problem import split_evenly
from holmes.planning.plan.plan import Plan
from holmes.planning.schedule import SCHEDULES, WARMED, fits_rounds, in_flight, warmup_of
from holmes.planning.simulate.job import Job, make_step
from holmes.planning.simulate.rates import Rates
from holmes.planning.simulate.result import Result, simulate
from holmes.planning.simulate.step import Boundary, Route, Step
from holmes_comm.errors import UsageError

#: How much longer than the shortest step one with fewer micro-batches in flight may be, or one of a simpler schedule:
#: a simulation is not better than that.
SAME = 0.01
#: What turns have to gain: messages that a link's queue takes go one after the other by themselves, which pipelines
#: that are simulated in lock-step do not.
_TURNS_GAIN = 0.1
_SHARES = (1.0, 0.5, 1.5, 0.75, 1.25, 2.0)  # of a boundary's round trip that its micro-batches in flight cover
_OPERATIONS = 40_000  # simulated to find one warm-up: a second
_SIMPLEST = ("1f1b", "gpipe", "interleaved", "zb-h1")


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule, its warm-up and group (as of a plan; None: its own), the simulated step, the micro-batches that each
    stage then holds, and the pipelines that take turns (None: they share the links)."""

    schedule: str
    chunks: int
    warmup: tuple[int, ...] | None
    group: int | None
    held: tuple[int, ...]
    result: Result
    turns: int | None = None

    @property
    def step_s(self) -> float:
        """Of the simulated step."""
        return self.result.step_s

    def text(self) -> str:
        """In a few words."""
        chunks = f" x{self.chunks}" if self.chunks > 1 else ""
        chunks += "" if self.group is None else f" in groups of {self.group}"
        warmup = "" if self.warmup is None else f" with {list(self.warmup)} forwards first"
        turns = "" if self.turns is None else f", {self.turns} pipelines in turns"
        return f"{self.schedule}{chunks}{warmup}{turns}"

    def plan(self, plan: Plan) -> Plan:
        """This plan with the schedule; stages keep their layers, even chunks of them."""
        layers = plan.layers_per_chunk
        if self.chunks != plan.chunks:
            layers = tuple(tuple(split_evenly(count, self.chunks)) for count in plan.layers_per_stage)
        return replace(
            plan,
            schedule=self.schedule,
            warmup=self.warmup,
            micro_batch_group=self.group,
            layers_per_chunk=layers,
            turns=self.turns,
        )


def best_schedule(
    job: Job,
    rates: Rates,
    *,
    most: int | Sequence[int] | None = None,
    schedules: Sequence[str] = SCHEDULES,
    chunks: int = 2,
    sharing: int | None = None,
) -> tuple[ScheduleChoice, ...]:
    """The best of each kind of schedule for this job, the best of all first. Local and deterministic.

    `most`: micro-batches that each stage's memory holds (of all chunks together, in whole ones), one number for all
    stages or one for each; None: memory is no limit. `chunks`: of the interleaved schedule where the job has one; it is
    left out where the layers or the micro-batches do not fill it. `sharing`: so many pipelines share the narrowest link
    between stages; where the best choice is a tenth shorter with these in turns, it has them (None: that is not looked
    for: steps gained less than simulated, docs/wan-measurements.md). Of choices within 1 % of each other the simpler
    one comes first, and the one that holds fewer. Raises ValueError where no schedule fits into memory.
    """
    limits = _limits(most, len(job.places), job.micro_batches)
    counts = {replica.micro_batches for replica in job.replicas}
    found: list[ScheduleChoice] = []
    steps: dict[str, Step] = {}
    for schedule in sorted(schedules, key=_SIMPLEST.index):
        own, stages = 1, len(job.places)
        fits = all(fits_rounds(schedule, stages, count) for count in counts)
        if schedule == "interleaved":
            own = max(job.chunks, chunks)
            fits = fits and stages > 1 and min(job.layers_per_stage) >= own
        elif job.shares is None:
            fits = True  # the batch may still be made to
        if not fits:
            continue
        step = make_step(replace(job, schedule=schedule, chunks=own, warmup=None, group=None, turns=None), rates)
        found += choices_of(step, limits, counts)
        steps[schedule] = step
    if not found:
        raise UsageError(
            f"none of the schedules {list(schedules)} fits {job.micro_batches} micro-batches on layers "
            f"{list(job.layers_per_stage)} with most={list(limits)} in flight; 1f1b and zb-h1 fit any of these"
        )
    best, *others = ranked(found)
    if sharing is None or len(counts) > 1:  # of pipelines that are alike the turns are simulated
        return (best, *others)
    step = replace(steps[best.schedule], warmup=best.warmup, group=best.group)
    return (_in_turns(step, best, sharing), *others)


def _in_turns(step: Step, choice: ScheduleChoice, sharing: int) -> ScheduleChoice:
    """The choice of this step, with so many of the pipelines that share links in turns as is shortest; as it is where
    that is not a tenth shorter. Of pipelines that share nothing the step is the same."""
    if len(step.stages) < 2:
        return choice
    found = [
        replace(choice, result=simulate(replace(step, turns=turns)), turns=turns)
        for turns in (2, 4)
        if turns <= sharing
    ]
    best = min(found, key=lambda one: one.step_s, default=choice)
    return best if best.step_s < choice.step_s * (1 - _TURNS_GAIN) else choice


def ranked(found: Sequence[ScheduleChoice]) -> tuple[ScheduleChoice, ...]:
    """Best first; the first is the simplest of those that take as long as the shortest."""
    best_s = min(choice.step_s for choice in found)
    same = [choice for choice in found if choice.step_s <= best_s * (1 + SAME)]
    first = min(same, key=lambda choice: (_SIMPLEST.index(choice.schedule), sum(choice.held)))
    others = [choice for choice in found if choice is not first]
    return (first, *sorted(others, key=lambda choice: choice.step_s))


def choices_of(step: Step, limits: Sequence[int], counts: Iterable[int] = ()) -> list[ScheduleChoice]:
    """The step with its schedule, at its best warm-up; none where a stage would hold more than its limit. `counts`:
    micro-batches of the replicas, where they differ."""
    if step.schedule in WARMED and len(step.stages) > 1:
        found = best_warmup(step, limits)
        return [] if found is None else [found]
    steps = [step]
    if step.schedule == "interleaved":
        stages, common = len(step.stages), math.gcd(step.micro_batches, *counts)
        steps += [replace(step, group=group) for group in range(stages + 1, common + 1) if common % group == 0]
    fitting = [_choice(one, simulate(one)) for one in steps if _fits(_held(one), limits)]
    if not fitting:
        return []
    least_s = min(choice.step_s for choice in fitting) * (1 + SAME / 2)
    return [
        next(choice for choice in fitting if choice.step_s <= least_s)
    ]  # the smallest group, which holds the fewest


def best_warmup(step: Step, limits: Sequence[int], operations: int = _OPERATIONS) -> ScheduleChoice | None:
    """With the fewest forwards before the first backward that are as fast as any; None where even one is too many.

    `operations`: forwards and backwards that may be simulated, though the usual warm-up and one that covers the round
    trips always are.
    """
    room = _room(step, limits)
    if min(room) < 1:
        return None
    budget = max(operations // (2 * step.micro_batches * len(step.stages)), 2)
    tried: dict[tuple[int, ...], Result] = {}

    def look(warmup: tuple[int, ...]) -> float:
        warmup = _within(warmup, room)
        if warmup not in tried and len(tried) < budget:
            tried[warmup] = simulate(replace(step, warmup=warmup))
        return tried[warmup].step_s if warmup in tried else math.inf

    for warmup in _starts(step):
        look(warmup)
    best = min(tried, key=lambda warmup: (tried[warmup].step_s, sum(warmup)))
    while True:  # each boundary's own micro-batches, one more or less
        near = {_within(other, room) for other in _neighbours(best)} - set(tried)
        for other in sorted(near):
            look(other)
        better = min(tried, key=lambda warmup: (tried[warmup].step_s, sum(warmup)))
        if better == best or len(tried) >= budget:
            best = better
            break
        best = better
    fewest = [warmup for warmup in tried if tried[warmup].step_s <= tried[best].step_s * (1 + SAME / 2)]
    chosen = min(fewest, key=lambda warmup: (sum(warmup), tried[warmup].step_s))
    stages, count = len(step.stages), step.micro_batches
    usual = tuple(warmup_of(stages, stage, count) for stage in range(stages))
    return _choice(replace(step, warmup=None if chosen == usual else chosen), tried[chosen])


def _starts(step: Step) -> Iterator[tuple[int, ...]]:
    """The usual one, one that covers each boundary's round trip, all forwards first, and those that cover shares."""
    stages, slot_s = len(step.stages), max(stage.forward_s + stage.backward_s for stage in step.stages)
    yield tuple(range(stages, 0, -1))
    trips_s = [_trip_s(boundary, step) for boundary in step.boundaries[: stages - 1]]
    for share in _SHARES:
        extra = [math.ceil(share * trip_s / slot_s) if slot_s > 0 else step.micro_batches for trip_s in trips_s]
        yield tuple(stages - i + sum(extra[i:]) for i in range(stages))
        if share == _SHARES[0]:
            yield (step.micro_batches,) * stages


def _trip_s(boundary: Boundary, step: Step) -> float:
    """Of an activation and the gradient that comes back."""

    def way_s(route: Route) -> float:
        return route.latency_s + boundary.size_bytes * max(
            (copies / step.links[link] for link, copies in route.copies.items()), default=0.0
        )

    return way_s(boundary.forward_route) + way_s(boundary.backward_route)


def _neighbours(warmup: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for end in range(1, len(warmup) + 1):  # the stages before boundary `end`
        for change in (1, -1):
            yield tuple(count + change if i < end else count for i, count in enumerate(warmup))


def _within(warmup: Sequence[int], room: Sequence[int]) -> tuple[int, ...]:
    """At least 1, at most what memory holds, and no stage more than the one before it."""
    found: list[int] = []
    for count, most in zip(warmup, room, strict=True):
        found.append(max(min(count, most, *found[-1:]), 1))
    return tuple(found)


def _room(step: Step, limits: Sequence[int]) -> list[int]:
    """The most forwards first of each stage. In "zb-h1" every stage holds as many as the first one."""
    least = min(limits)
    return [min(least if step.schedule == "zb-h1" else limit, step.micro_batches) for limit in limits]


def _limits(most: int | Sequence[int] | None, stages: int, micro_batches: int) -> tuple[int, ...]:
    if most is None or isinstance(most, int):
        most = [micro_batches if most is None else most] * stages
    if len(most) != stages or min(most) < 1:
        raise UsageError(
            f"most={list(most)} must be {stages} numbers of at least 1, one for each stage, or one for all"
        )
    return tuple(most)


def _held(step: Step) -> tuple[int, ...]:
    stages = len(step.stages)
    return tuple(
        math.ceil(
            in_flight(step.schedule, stages, step.chunks, step.micro_batches, stage, step.warmup, step.group)
            .sum(axis=1)
            .max()
            / step.chunks
        )
        for stage in range(stages)
    )


def _fits(held: Sequence[int], limits: Sequence[int]) -> bool:
    return all(count <= limit for count, limit in zip(held, limits, strict=True))


def _choice(step: Step, result: Result) -> ScheduleChoice:
    return ScheduleChoice(step.schedule, step.chunks, step.warmup, step.group, _held(step), result)
