"""Pipelines that share an uplink, and that take turns on it: `python benchmarks/bench_turns.py`.

Two clusters of --pipelines nodes, a stage in each, one uplink. Every pipeline runs the operations of a schedule; a pass
sleeps as long as it would compute, so that ranks take no processor from each other, and its messages go over groups of
the priority that a plan gives. Steps without and with turns follow each other. The simulator is told the passes and
what one pipeline's messages take alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

import numpy as np
from rank_jobs import parse_or_work, results_of, tell_result
from two_clusters import begin_together, last_after, spec_of_clusters

from holmes.planning.simulate import Boundary, Route, Stage, Step, operations, simulate

VARIANTS = ("shared", "turns")


class Rank:
    """A stage of one pipeline."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Connects. Collective."""
        import holmes_comm

        self.job = job
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.stage, self.pipeline = divmod(rank, size // 2)
        store = holmes_comm.TcpStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, is_server=rank == 0)
        clusters: dict[str, Any] = {"cluster": "ab"[self.stage], "hierarchical_min_bytes": "never"}
        self.world = holmes_comm.init(store, rank, size, name="world", **clusters)
        self.pairs = {
            name: holmes_comm.init(
                store,
                self.stage,
                2,
                name=f"pp{self.pipeline}.{name}",
                priority=3,
                turn=self.pipeline if name == "turns" else None,
                **clusters,
            )
            for name in VARIANTS
        }
        self.out = np.zeros(job["message_bytes"] // 8)
        self.arrived = [np.zeros_like(self.out) for _ in range(job["micro_batches"])]

    def begin(self) -> float:
        """The moment at which all ranks begin. Collective."""
        return begin_together(self.world, self.job["round_trip_s"] + 0.01)

    def alone(self, count: int) -> float:
        """Seconds of so many messages of the first pipeline. Collective."""
        begin_s = self.begin()
        if self.pipeline == 0:
            pair = self.pairs["shared"]
            for _ in range(count):
                if self.stage == 0:
                    pair.send(self.out, 1)
                else:
                    pair.recv(self.arrived[0], 0)
        return last_after(self.world, begin_s)

    def step(self, name: str) -> float:
        """Seconds of a step. Collective."""
        pair, job, peer = self.pairs[name], self.job, 1 - self.stage
        begin_s = self.begin()
        arrivals = [pair.recv(data, peer, async_op=True) for data in self.arrived]
        sent = []
        for operation in operations(job["schedule"], 2, self.stage, job["micro_batches"]):
            is_forward = operation.phase == "F"
            if is_forward == (self.stage == 1):
                arrivals[operation.micro_batch].wait()
            time.sleep(job["forward_s"] if is_forward else job["backward_s"])
            if is_forward == (self.stage == 0):
                sent.append(pair.send(self.out, peer, async_op=True))
        for work in sent:
            work.wait()
        return last_after(self.world, begin_s)


def work(job: dict[str, Any]) -> None:
    """What every rank runs; rank 0 prints the result."""
    rank = Rank(job)
    found: dict[str, list[float]] = {name: [] for name in ("one", "five", *VARIANTS)}
    for number in range(job["steps"] + 2):
        taken_s = {"one": rank.alone(1), "five": rank.alone(5), **{name: rank.step(name) for name in VARIANTS}}
        for name, seconds in taken_s.items():
            if number > 1:  # the first two warm up
                found[name].append(seconds)
    if rank.stage == rank.pipeline == 0:
        tell_result(found)
    rank.world.barrier()


def run(arguments: argparse.Namespace, round_trip_ms: float) -> dict[str, float]:
    """On the testbed; medians in seconds."""
    from holmes.lab.testbed import Testbed

    uplink = {"rate_gbps": arguments.rate_gbps, "delay_ms": round_trip_ms / 2}
    job = {
        "message_bytes": int(arguments.message_mib * 2**20) // 8 * 8, "micro_batches": arguments.micro_batches,
        "forward_s": arguments.forward_ms / 1e3, "backward_s": 2 * arguments.forward_ms / 1e3,
        "schedule": arguments.schedule, "steps": arguments.steps, "round_trip_s": round_trip_ms / 1e3,
    }  # fmt: skip
    with Testbed(spec_of_clusters("turns", arguments.pipelines, uplink)).session() as session:
        outcome = session.launch([sys.executable, __file__, "--rank", json.dumps(job)]).wait(600.0)
    (found,) = results_of(outcome)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def predicted(arguments: argparse.Namespace, found: dict[str, float], turns: int | None) -> float:
    """Seconds of the simulated step."""
    message_s = (found["five"] - found["one"]) / 4
    ways = [Route({way: float(arguments.pipelines)}, max(found["one"] - message_s, 0.0)) for way in ("down", "up")]
    stage = Stage(arguments.forward_ms / 1e3, 2 * arguments.forward_ms / 1e3)
    links = {"down": 1.0, "up": 1.0}
    boundary = Boundary(*ways, message_s)  # of a link that carries one byte a second
    return simulate(
        Step((stage,) * 2, (boundary,), links, arguments.micro_batches, arguments.schedule, turns=turns)
    ).step_s


def main() -> None:
    """Runs it and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-gbps", type=float, default=0.1, help="of the uplinks (default 0.1)")
    parser.add_argument("--round-trips-ms", type=float, nargs="+", default=[0, 20, 80])
    parser.add_argument("--pipelines", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--forward-ms", type=float, default=40, help="of a micro-batch; a backward takes twice as long")
    parser.add_argument("--message-mib", type=float, default=0.5)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--steps", type=int, default=7)
    arguments = parse_or_work(parser, work)
    print("| round trip (ms) | message alone (ms) | pipelines | step (ms) | simulated (ms) |")
    print("| --- | --- | --- | --- | --- |")
    for round_trip_ms in arguments.round_trips_ms:
        found = run(arguments, round_trip_ms)
        for name in VARIANTS:
            told_s = predicted(arguments, found, arguments.pipelines if name == "turns" else None)
            print(
                f"| {round_trip_ms:g} | {found['one'] * 1e3:.0f} | {name} | {found[name] * 1e3:.0f} | "
                f"{told_s * 1e3:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
