"""Faults of elastic jobs that need nodes of their own: a host that is half dead, a network that is split."""

from __future__ import annotations

import random
import time
from pathlib import Path

from holmes.lab.stress.elastic.catalogue import elastic_fault
from holmes.lab.stress.elastic.expected import DECAY, gradient
from holmes.lab.stress.elastic.nodes import STORE_NODE, Network, NodeJob, spec_with_store
from holmes.lab.stress.elastic.partitions import NODES, run_partitions, set_partitions
from holmes.lab.stress.elastic.settings import JobSettings
from holmes.lab.stress.elastic.witness import FolderWitness, StepWitness
from holmes.lab.testbed import Testbed

_START_S, _END_S = 90.0, 240.0
_RULES = {"lease_s": 3.0, "join_timeout_s": 30.0, "agree_timeout_s": 20.0, "whole_nodes": False}
#: Setting up groups over a network that swallows everything takes `timeout_s` each time.
_TIMES = {"heartbeat_s": 0.5, "dead_after_s": 3.0, "timeout_s": 10.0}


@elastic_fault("half-dead", "a node's data network swallows everything, while it reaches the store as ever")
def half_dead(folder: Path, choice: random.Random) -> tuple[str, list[str]]:
    """Its heartbeat is well, so it joins every generation; after three that it failed the others go on without it."""
    node = choice.choice(NODES)
    others = [other for other in NODES if other != node]
    steps, written = StepWitness(DECAY, gradient), FolderWitness(folder / "run")
    problems = []
    with Testbed(spec_with_store()).session() as session:
        settings = JobSettings(len(NODES), 1_000_000_000, _RULES, _TIMES)
        (folder / "run").mkdir()
        with NodeJob(session, folder / "run", settings, steps.hear) as job:
            written.start()
            if not job.wait_for(lambda: any(s["ranks"] == len(NODES) for s in job.steps_since(0)), _START_S):
                problems.append(f"all four did not train within {_START_S:g} s: {job.last_words()}")
            time.sleep(choice.uniform(0.5, 3.0))
            Network(session).cut([(node, other) for other in others])
            cut_s = time.monotonic()

            def is_left_out() -> bool:
                trained = [s for s in job.steps_since(cut_s) if s["ranks"] == len(others)]
                return job.ranks[node].error == "LeftOutError" and {s["node"] for s in trained} == set(others)

            if not job.wait_for(is_left_out, _END_S, restarts=False):
                problems.append(f"{node} was not left out within {_END_S:g} s: {job.last_words()}")
        written.stop()
    problems += steps.take_problems() + written.take_problems()
    return f"{node} reaches the store and no other node", problems


@elastic_fault(
    "partition", "the nodes of an elastic job and its store are split, in one of the 52 ways, and whole again"
)
def partition(folder: Path, choice: random.Random) -> tuple[str, list[str]]:
    """The block with the store goes on where it is large enough, nobody else does (`--partitions`: all of them)."""
    seed, number = choice.randrange(2**31), choice.randrange(3 * len(list(set_partitions((*NODES, STORE_NODE)))))
    result = run_partitions(0.0, seed, lambda line: None, number)
    if result.is_interrupted:
        raise KeyboardInterrupt
    problems = [text for texts in result.problems.values() for text in texts]
    return f"{', '.join(result.tried)} (--partitions --seed {seed} --episode {number})", problems
