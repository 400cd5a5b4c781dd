"""Whether an elastic job went as one unbroken run: the same numbers, and never two generations at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import pairwise

from holmes.lab.stress.elastic.expected import unbroken
from holmes.lab.stress.elastic.job import ElasticJob, Rank
from holmes.lab.stress.elastic.settings import STEPS


def progress_problems(job: ElasticJob, generations: Collection[int] | None = None) -> list[str]:
    """What is wrong with what the ranks of a job did. `generations`: the only ones that there may be."""
    problems = _value_problems(job.all) + _overlaps(job.all)
    steps = {event["step"] for rank in job.all for event in rank.events if event["event"] == "step"}
    if missing := set(range(STEPS)) - steps:
        problems.append(f"nobody did the steps {sorted(missing)[:5]}")
    found = {event["generation"] for rank in job.all for event in rank.events if event["event"] == "step"}
    if generations is not None and found != set(generations):
        problems.append(f"there were the generations {sorted(found)} instead of {sorted(generations)}")
    return problems


def error_problems(ranks: Iterable[Rank], error: str) -> list[str]:
    """Which of these did not end with this error."""
    problems = []
    for rank in ranks:
        said = rank.said("error")
        if said is None or said["error"] != error:
            problems.append(f"rank {rank.place} ended with {said or rank.process.returncode} instead of {error}")
    return problems


def _value_problems(ranks: Iterable[Rank]) -> list[str]:
    done = [event["value"] for rank in ranks if (event := rank.said("done")) is not None]
    values = [value for value in done if value is not None]  # None: of one that came too late
    right = unbroken(STEPS)
    problems = [
        f"a rank ended with {value!r} instead of {right!r}" for value in values if not abs(value - right) < 1e-9
    ]
    for rank in ranks:
        if rank.process.returncode not in (0, 3, -9):
            tail = " / ".join(list(rank.last)[-5:])
            problems.append(f"rank {rank.place} ended with {rank.process.returncode}: {tail}")
    return problems or ([] if values else ["no rank has trained to the end"])


def _overlaps(ranks: Iterable[Rank]) -> list[str]:
    """Generations that trained at one time: a step of the earlier one began after one of the later, on any ranks.

    When a step began counts, not when it was told: a rank may be stopped between its last all_reduce and the telling.
    """
    times_s: dict[int, list[float]] = defaultdict(list)
    for rank in ranks:
        for event in rank.events:
            if event["event"] == "step":
                times_s[event["generation"]].append(event["began_s"])
    numbers = sorted(times_s)
    return [
        f"generation {earlier} still trained {max(times_s[earlier]) - min(times_s[later]):.2f} s after {later} began"
        for earlier, later in pairwise(numbers)
        if max(times_s[earlier]) > min(times_s[later])
    ]
