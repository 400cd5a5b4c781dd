"""Pipeline messages and a saturating all_reduce on one uplink: `python benchmarks/bench_uplink.py`.

Two clusters of four nodes, one uplink each. Every node of the first sends 1 MiB to its counterpart again and again,
while all of them reduce over the uplink without a pause. In turns, in each round: the messages on an idle link, the
all_reduce alone, both without priorities, both with those that a plan gives (pipeline 3, data parallel 1), and the
all_reduce alone with its priority. Prints a table: times of the messages from call to receipt (all nodes share a
clock), and what the all_reduce carried over the uplink.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from typing import Any

import numpy as np
from rank_jobs import parse_or_work, results_of, tell_result
from result_files import write_results
from two_clusters import spec_of_clusters

MIB = 2**20
NODES = 4
#: Name, whether there are messages, whether there is an all_reduce, whether there are priorities.
PHASES = (
    ("messages, idle link", True, False, False),
    ("all_reduce alone", False, True, False),
    ("both, no priorities", True, True, False),
    ("both, priorities", True, True, True),
    ("all_reduce alone, priority", False, True, True),
)


class Rank:
    """One node's part."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Connects. Collective."""
        import holmes_comm

        self.job = job
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.is_sender = self.rank < NODES
        store = holmes_comm.TcpStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, is_server=self.rank == 0
        )

        def make(name: str, place: int, size: int, priority: int | None, **more: Any) -> Any:
            return holmes_comm.init(store, place, size, name=name, priority=priority, **more)

        clusters: dict[str, Any] = {"cluster": "ab"[self.rank // NODES], "hierarchical_min_bytes": 0}
        self.world = make("world", self.rank, self.size, None)
        pair = self.rank % NODES
        self.reduces = {p: make(f"dp{p}", self.rank, self.size, 1 if p else None, **clusters) for p in (False, True)}
        self.pairs = {
            p: make(f"pp{pair}.{p}", self.rank // NODES, 2, 3 if p else None, **clusters) for p in (False, True)
        }
        self.data = np.ones(job["reduce_bytes"] // 4, "float32")

    def reduce_until(self, comm: Any, stop: threading.Event, done: list[float]) -> None:
        """Reduces without a pause until rank 0 says it is over; appends the time of each end."""
        while True:
            self.data[0] = self.rank == 0 and stop.is_set()
            comm.all_reduce(self.data)
            done.append(time.monotonic())
            if self.data[0] > 0:
                return
            self.data[:] = 1

    def messages(self, comm: Any) -> list[float]:
        """Sends them, at the same times in each phase, or receives them and returns their times in seconds."""
        data = np.zeros(self.job["message_bytes"] // 8)
        random_s = random.Random(self.rank)
        taken_s: list[float] = []
        due_s = time.monotonic()
        for _ in range(self.job["messages"]):
            if self.is_sender:
                due_s += self.job["interval_s"] * random_s.uniform(0.5, 1.5)
                time.sleep(max(0.0, due_s - time.monotonic()))
                data[0] = time.monotonic()
                comm.send(data, 1)
            else:
                comm.recv(data, 0)
                taken_s.append(time.monotonic() - data[0])
        return taken_s

    def phase(self, has_messages: bool, has_reduce: bool, priorities: bool) -> dict[str, Any]:
        """Returns the times of this rank's messages, and the bytes per second of the reduced data. Collective."""
        self.world.barrier()
        stop, done, taken_s = threading.Event(), [], []
        thread = threading.Thread(target=self.reduce_until, args=(self.reduces[priorities], stop, done))
        start_s = time.monotonic()
        if has_reduce:
            thread.start()
        if has_messages:
            taken_s = self.messages(self.pairs[priorities])
        else:
            time.sleep(self.job["messages"] * self.job["interval_s"])
        self.world.barrier()
        stop.set()
        if has_reduce:
            thread.join()
        carried = self.data.nbytes * len(done) / (done[-1] - start_s) if done else 0.0
        return {"taken_s": taken_s, "bytes_per_s": carried}


def work(job: dict[str, Any]) -> None:
    """What every rank runs; each prints its result as JSON."""
    rank = Rank(job)
    results: dict[str, list[Any]] = {name: [] for name, *_ in PHASES}
    for number in range(job["rounds"] + 1):
        for name, *switches in PHASES:
            found = rank.phase(*switches)
            if number > 0:  # the first warms up
                results[name].append(found)
    tell_result(results)
    rank.world.barrier()


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """On the testbed; returns times and rates by phase."""
    from holmes.lab.testbed import Testbed
    from holmes.lab.testbed.check import slowness, too_slow

    uplink: dict[str, Any] = {"rate_gbps": arguments.rate_gbps, "queue_ms": arguments.queue_ms}
    if arguments.round_trip_ms:
        uplink["delay_ms"] = arguments.round_trip_ms / 2
    job = {
        "reduce_bytes": int(arguments.reduce_mib * MIB), "message_bytes": MIB, "messages": arguments.messages,
        "interval_s": arguments.interval_s, "rounds": arguments.rounds,
    }  # fmt: skip
    with Testbed(spec_of_clusters("shared-uplink", NODES, uplink)).session() as session:
        before = session.line_counters()
        outcome = session.launch([sys.executable, __file__, "--rank", json.dumps(job)]).wait(1500.0)
        late = too_slow(*slowness(before, session.line_counters()))
    found = results_of(outcome)
    if len(found) != 2 * NODES:
        raise SystemExit(f"{len(found)} of {2 * NODES} ranks told what they found")
    phases = {}
    for name, *_ in PHASES:
        taken_s = sorted(t for rank in found for part in rank[name] for t in part["taken_s"])
        rates = [float(np.median([rank[name][i]["bytes_per_s"] for rank in found])) for i in range(job["rounds"])]
        phases[name] = {"taken_s": taken_s, "bytes_per_s": float(np.median(rates)), "rounds_bytes_per_s": rates}
    return {"phases": phases, "too_slow": late}


def table(phases: dict[str, Any]) -> str:
    """Of a run."""
    idle_s = float(np.percentile(phases[PHASES[0][0]]["taken_s"], 99))
    lines = [
        "| | message, median (ms) | p90 | p99 | p99 over idle | all_reduce (Mbit/s) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, has_messages, has_reduce, _ in PHASES:
        cells = ["-"] * 4
        if has_messages:
            median_s, p90_s, p99_s = np.percentile(phases[name]["taken_s"], [50, 90, 99])
            cells = [f"{median_s * 1e3:.0f}", f"{p90_s * 1e3:.0f}", f"{p99_s * 1e3:.0f}", f"{p99_s / idle_s:.2f}"]
        cells.append(f"{phases[name]['bytes_per_s'] * 8 / 1e6:.1f}" if has_reduce else "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Runs it, prints the table, writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-gbps", type=float, default=0.1, help="of the uplinks (default 0.1)")
    parser.add_argument("--round-trip-ms", type=float, default=0)
    parser.add_argument("--queue-ms", type=float, default=50, help="what waits at the uplink at most (default 50)")
    parser.add_argument("--messages", type=int, default=12, help="of each node, in each round and phase")
    parser.add_argument("--interval-s", type=float, default=2.0, help="between a node's messages, on average")
    parser.add_argument("--reduce-mib", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json and NAME.md")
    arguments = parse_or_work(parser, work)
    result = run(arguments)
    text = table(result["phases"])
    print(text, flush=True)
    if result["too_slow"]:
        print(result["too_slow"])
    if arguments.save:
        late = f"\n\n{result['too_slow']}" if result["too_slow"] else ""
        write_results(
            __file__,
            arguments.save,
            heading=f"One uplink for messages and gradients\n\nTwo clusters of {NODES} emulated nodes, an uplink of "
            f"{arguments.rate_gbps * 1e3:g} Mbit/s with a queue of {arguments.queue_ms:g} ms and a round trip of "
            f"{arguments.round_trip_ms:g} ms",
            notes=f"messages of 1 MiB, all_reduce of {arguments.reduce_mib:g} MiB.",
            ranks=2 * NODES,
            settings={"rate_gbps": arguments.rate_gbps, "rounds": arguments.rounds},
            text=text + late,
            result=result,
        )


if __name__ == "__main__":
    main()
