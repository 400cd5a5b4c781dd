"""Partitions: an elastic job on four nodes while they and the store are split in every way, one after the other.

The scenario of tests/unit/test_membership_model.py on real sockets: nobody writes beside a later generation, the half
with the store goes on where it is large enough, nobody else does, and what is trained is what an unbroken run trains.
"""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holmes.lab.stress.elastic.expected import DECAY, gradient
from holmes.lab.stress.elastic.nodes import STORE_NODE, Network, NodeJob, spec_with_store
from holmes.lab.stress.elastic.settings import JobSettings
from holmes.lab.stress.elastic.witness import FolderWitness, StallMeter, StepWitness
from holmes.lab.testbed import Testbed

Partition = tuple[frozenset[str], ...]
NODES = ("a0", "a1", "b0", "b1")
LEASE_S = 4.0  # a heartbeat is late by that only on a machine that is
#: In turn, a job each: more than half as ever, a half, whoever has the store.
_LEAST = (3, 2, 1)
_STEPS = 5  # that prove that a generation trains
#: In leases: all train after the start, a block decides, all train again; for machines under load.
_START, _DECIDE, _RETURN = 25, 15, 25
_LOST = 7  # leases: a rank has given up a silent store
_LONG_SHARE = 0.15  # of the partitions last for so long
_HEARTBEATS = 8  # in a lease; it is looked at twice a heartbeat


def set_partitions(items: Sequence[str]) -> Iterator[Partition]:
    """Every way to split them into blocks: 52 of five."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = [item for item in rest if item not in others]
            for blocks in set_partitions(left):
                yield (frozenset((first, *others)), *blocks)


def cut_pairs(partition: Partition) -> list[tuple[str, str]]:
    """Who no longer reaches whom."""
    return [
        (one, other)
        for block, beyond in itertools.combinations(partition, 2)
        for one in sorted(block)
        for other in sorted(beyond)
    ]


def describe(partition: Partition) -> str:
    """As "a0 a1 store | b0 | b1", the store's block first."""
    blocks = sorted(partition, key=lambda block: (STORE_NODE not in block, sorted(block)))
    names = [" ".join("store" if name == STORE_NODE else name for name in sorted(block)) for block in blocks]
    return " | ".join(names)


_TOLD_OTHERWISE = ("tried", "ended", "problems", "is_interrupted")


@dataclass
class PartitionResult:
    """`tried`: by partition, how often; `went_on`, `stopped`: in how many a block trained on, or rightly none did.

    `problems`: what was wrong, by the number of the split; `generations`, `steps`: that were trained;
    `is_interrupted`: Ctrl-C or SIGTERM came before its time was over.
    """

    seed: int
    tried: Counter[str] = field(default_factory=Counter)
    went_on: int = 0
    stopped: int = 0
    generations: int = 0
    steps: int = 0
    checkpoints: int = 0
    ended: Counter[str] = field(default_factory=Counter)  # ranks that ended by an error, by its name
    seconds: float = 0.0
    worst_stall_s: float = 0.0
    problems: dict[int, list[str]] = field(default_factory=dict)
    is_interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """0 where every split went as it must."""
        return int(bool(self.problems or not self.tried))

    def summary(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            **{name: value for name, value in vars(self).items() if name not in _TOLD_OTHERWISE},
            "partitions": dict(self.tried),
            "ended": dict(self.ended),
            "problems": {str(number): lines for number, lines in self.problems.items()},
        }

    def markdown(self) -> str:
        """What was tried, and what came of it."""
        ended = ", ".join(f"{name} {count}" for name, count in sorted(self.ended.items())) or "none"
        lines = [
            f"{sum(self.tried.values())} splits in {self.seconds:.0f} s, seed {self.seed}: {len(self.tried)} of 52 "
            f"ways, {self.went_on} with a block that went on, {self.stopped} in which all had to stop.",
            "",
            f"{self.generations} generations, {self.steps} steps and {self.checkpoints} checkpoints; ranks that ended "
            f"and were started again: {ended}. The machine stood still for {self.worst_stall_s:.2f} s at most.",
            "",
            f"Splits that went wrong: {len(self.problems) or 'none'}.",
        ]
        lines += [f"- split {number}: {text}" for number, texts in self.problems.items() for text in texts]
        return "\n".join(lines) + "\n"


def run_partitions(
    seconds: float, seed: int, say: Callable[[str], None], only: int | None = None, lease_s: float = LEASE_S
) -> PartitionResult:
    """Every partition of the nodes and the store, in an order by seed, again and again until time is over.

    One job lives through all 52 of a round; the next has another `min_ranks`. `only`: this split of the seed alone.
    `lease_s`: of Rules, and how long a rank may be silent; more for a machine that is shared with others.
    KeyboardInterrupt between the building and the end of a job ends it early, with the result till then. Raises
    TestbedError where there can be no testbed.
    """
    result = PartitionResult(seed)
    began_s = time.monotonic()
    job_number, is_done = 0, False
    while not is_done:
        order = list(set_partitions((*NODES, STORE_NODE)))
        random.Random(f"{seed}/{job_number}").shuffle(order)
        numbers = range(job_number * len(order), (job_number + 1) * len(order))
        if only is not None:
            numbers = range(only, only + 1) if only in numbers else range(0)
        if numbers:
            with _Run(seed, _LEAST[job_number % len(_LEAST)], lease_s, result, say) as run:
                try:
                    for number in numbers:
                        if only is None and time.monotonic() - began_s >= seconds:
                            break
                        run.split(number, order[number % len(order)], time.monotonic() - began_s)
                except KeyboardInterrupt:
                    result.is_interrupted = True
                run.finish()
        result.seconds = time.monotonic() - began_s
        is_done = result.is_interrupted or (bool(numbers) if only is not None else result.seconds >= seconds)
        job_number += 1
    return result


class _Run:
    """One job, and those who watch what it does. Use as a context manager."""

    def __init__(
        self, seed: int, least: int, lease_s: float, result: PartitionResult, say: Callable[[str], None]
    ) -> None:
        self._seed, self._least, self._lease_s, self._result, self._say = seed, least, lease_s, result, say
        self._folder = Path(tempfile.mkdtemp(prefix="holmes-partitions-"))
        self._steps = StepWitness(DECAY, gradient)
        self._written = FolderWitness(self._folder)
        self._stalls = StallMeter()
        self._session = Testbed(spec_with_store()).session()

    def __enter__(self) -> _Run:
        """Builds the testbed and waits until all train."""
        self._session.__enter__()
        self._network = Network(self._session)
        rules = {
            "lease_s": self._lease_s,
            "min_ranks": self._least,
            "join_timeout_s": 15 * self._lease_s,
            "agree_timeout_s": 5 * self._lease_s,
            "whole_nodes": False,
            "blamed_generations": 1_000_000,  # who is cut off again and again is not to blame
        }
        times = {
            "heartbeat_s": self._lease_s / _HEARTBEATS,
            "dead_after_s": self._lease_s,
            "timeout_s": 10 * self._lease_s,
            "max_failures": 1_000_000,
        }
        settings = JobSettings(len(NODES), 1_000_000_000, rules, times)
        self._job = NodeJob(self._session, self._folder, settings, self._steps.hear)
        self._written.start()
        self._stalls.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the job and the testbed."""
        self._stalls.stop()
        self._written.stop()
        self._job.__exit__()
        self._session.__exit__(None, None, None)
        shutil.rmtree(self._folder, ignore_errors=True)

    def split(self, number: int, partition: Partition, gone_s: float) -> None:
        """All train; the network is split; it is whole again and all train. What is wrong goes into the result."""
        choice = random.Random(f"{self._seed}/split {number}")
        block = next(block for block in partition if STORE_NODE in block) - {STORE_NODE}
        problems: list[str] = []
        self._stalls.take()
        if not self._train_as(frozenset(NODES), _START * self._lease_s):
            problems.append(f"all four did not train within {_START} leases: {self._job.last_words()}")
        time.sleep(choice.uniform(0.2, 1.5))
        cut_s = time.monotonic()
        self._network.cut(cut_pairs(partition))
        goes_on = len(block) >= self._least
        is_whole = len(partition) == 1
        is_long = choice.random() < _LONG_SHARE
        lost_s = _LOST * self._lease_s
        if goes_on:
            if not self._train_as(block, _DECIDE * self._lease_s, cut_s):
                problems.append(f"{_names(block)} did not go on within {_DECIDE} leases: {self._job.last_words()}")
            went_on_s = time.monotonic() - cut_s
            self._job.wait_for(lambda: False, lost_s if is_long else choice.uniform(0.5, 3.0))
        else:
            self._job.wait_for(lambda: False, lost_s if is_long else 2.5 * self._lease_s + choice.uniform(0.0, 3.0))
        problems += self._wrong_trainers(block if goes_on else frozenset(), cut_s, is_whole)
        self._network.heal()
        healed_s = time.monotonic()
        if not self._train_as(frozenset(NODES), _RETURN * self._lease_s, healed_s):
            problems.append(f"all four did not train within {_RETURN} leases of its end: {self._job.last_words()}")
        problems += self._steps.take_problems() + self._written.take_problems()
        stall_s = self._stalls.take()
        result = self._result
        result.worst_stall_s = max(result.worst_stall_s, stall_s)
        result.tried[describe(partition)] += 1
        result.went_on += goes_on
        result.stopped += not goes_on
        if problems:
            result.problems[number] = [*problems, f"(the machine stood still for {stall_s:.2f} s at most)"]
        outcome = f"{_names(block)} went on after {went_on_s:.1f} s" if goes_on else "nobody went on"
        state = "WRONG" if problems else "ok"
        self._say(
            f"[{gone_s:4.0f} s] split {number} {state}: {describe(partition)} (at least {self._least} train): "
            f"{outcome}, all again {time.monotonic() - healed_s:.1f} s after its end; stalls {stall_s:.2f} s"
        )
        for problem in problems:
            self._say(f"  PROBLEM: {problem}")
        if problems:
            self._say(
                f"  again: holmes stress --testbed --partitions --seed {self._seed} --episode {number} "
                f"--lease-s {self._lease_s:g}"
            )

    def finish(self) -> None:
        """Counts what was trained."""
        self._result.generations += self._steps.generations
        self._result.steps += self._steps.count
        self._result.checkpoints += self._written.count
        self._result.ended.update(rank.error or "no word" for rank in self._job.ended)

    def _train_as(self, nodes: frozenset[str], timeout_s: float, since_s: float | None = None) -> bool:
        """Waits until these, and no others, have trained some steps of one generation, begun after `since_s`."""
        since_s = time.monotonic() if since_s is None else since_s

        def trained() -> bool:
            found: dict[int, Counter[str]] = {}
            for step in self._job.steps_since(since_s):
                if step["ranks"] == len(nodes):
                    found.setdefault(step["generation"], Counter())[step["node"]] += 1
            return any(counts.keys() == nodes and min(counts.values()) >= _STEPS for counts in found.values())

        return self._job.wait_for(trained, timeout_s)

    def _wrong_trainers(self, block: frozenset[str], cut_s: float, is_whole: bool) -> list[str]:
        """Who trained once the leases of all who were cut off were over, and should not have."""
        over_s = cut_s + self._lease_s * (1 + 2 / _HEARTBEATS)
        found = Counter(step["node"] for step in self._job.steps_since(over_s) if step["node"] not in block)
        problems = [f"{node} trained {count} steps without the store" for node, count in sorted(found.items())]
        generations = {step["generation"] for step in self._job.steps_since(cut_s)}
        if is_whole and len(generations) > 1:
            problems.append(f"nothing was cut, but the generation ended: {sorted(generations)}")
        return problems


def _names(nodes: frozenset[str]) -> str:
    return " ".join(sorted(nodes)) or "nobody"
