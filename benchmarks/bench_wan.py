"""Between data centres: `python benchmarks/bench_wan.py` makes the tables of docs/wan-measurements.md.

Two clusters of two nodes, four times as fast inside (a hierarchical all_reduce sends three halves of its data over each
NIC), joined by uplinks of `--rate-gbps` with a round trip and a loss: for each pair of these, on the same links and in
turns, a message and a hierarchical all_reduce of Holmes, the all_reduce of one rank of each cluster, the same of Gloo
(all_reduce over all ranks, as it has no hierarchy), a message after a second's pause, and iperf3 with 1 to 16 streams,
one way and both ways. Rates are payload over the uplink, one direction, medians of the rounds; in parentheses two
shares of iperf3's best. The first is of as many bytes from iperf3's start on (`-n`); what is under way as its sender
ends is not waited for. The second is of seconds of which the first half is not counted (`-t`, `-O`), so that it
contains no start. Both are of both ways for an all_reduce, where the slower direction counts. The links are emulated:
rows in which many of the emulator's frames left late are about the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from rank_jobs import parse_or_work, results_of, tell_result
from result_files import write_results
from two_clusters import begin_together, last_after, spec_of_clusters

MIB = 2**20
STREAMS = (1, 2, 4, 8, 16)
PAUSE_S = 1.0
#: How much faster a NIC is than the uplink.
INSIDE = 4
#: Forms of iperf3, and what says how many bytes they carry (None: for some seconds, once it has begun).
WAYS = {"one": None, "both": None, "one_same": "size_bytes", "both_same": "size_bytes", "one_short": "pause_bytes"}


# --- a rank: 0 and 1 in cluster a, 2 and 3 in cluster b ---


class Bench:
    """What one rank times."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Connects. Collective."""
        import torch
        import torch.distributed as dist

        import holmes_comm

        self.job, self.dist = job, dist
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = holmes_comm.TcpStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, is_server=self.rank == 0
        )
        cluster = {"cluster": "ab"[self.rank // 2], "hierarchical_min_bytes": 0}
        nics = holmes_comm.NicSelection(names=("eth0",))
        self.comm = holmes_comm.init(store, self.rank, self.size, nics=nics, name="wan", **cluster)
        self.pair = None
        if self.rank % 2 == 0:
            self.pair = holmes_comm.init(store, self.rank // 2, 2, nics=nics, name="pair")
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        dist.init_process_group("gloo")
        self.data = np.ones(job["size_bytes"] // 4, "float32")
        self.tensor = torch.from_numpy(self.data)
        self.small = np.ones(job["pause_bytes"] // 4, "float32")

    def timed(self, run: Any, pause_s: float = 0.0) -> float:
        """Seconds from when all ranks begin, at one moment of the clock that they share, to when the last one is done.
        Collective."""
        begin_s = begin_together(self.comm, max(pause_s, self.job["round_trip_s"] + 0.01))
        run()
        return last_after(self.comm, begin_s)

    def message(self, data: np.ndarray) -> None:
        """From rank 0 to rank 2."""
        if self.rank == 0:
            self.comm.send(data, 2)
        elif self.rank == 2:
            self.comm.recv(data, 0)

    def pair_all_reduce(self) -> None:
        """Of ranks 0 and 2."""
        if self.pair is not None:
            self.pair.all_reduce(self.data)

    def gloo_message(self) -> None:
        if self.rank == 0:
            self.dist.send(self.tensor, 2)
        elif self.rank == 2:
            self.dist.recv(self.tensor, 0)

    def iperf3_gbps(self, streams: int, algorithm: str, way: str) -> float:
        """What iperf3 carries from rank 0 to rank 2, or at least in each direction; `way`: of WAYS. Collective."""
        gbps = np.zeros(1)
        self.comm.barrier()
        if self.rank == 0:
            command = ["iperf3", "-c", self.job["address"], "-P", str(streams), "-C", algorithm, "-J"]
            seconds, same = self.job["iperf3_s"], WAYS[way]
            command += ["-n", str(self.job[same])] if same else ["-t", str(seconds), "-O", str(max(1, seconds // 2))]
            command += ["--bidir"] if way.startswith("both") else []
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
            end = json.loads(done.stdout).get("end", {})
            sums = [end[key] for key in ("sum_received", "sum_received_bidir_reverse") if key in end]
            gbps[0] = min((one["bits_per_second"] / 1e9 for one in sums), default=0.0)
        self.comm.all_reduce(gbps, "max")
        return float(gbps[0])

    def run(self) -> dict[str, Any]:
        """All forms in turns: seconds of each round, and iperf3's rates by ways, algorithm and streams."""
        forms = {
            "send": lambda: self.timed(lambda: self.message(self.data)),
            "gloo_send": lambda: self.timed(self.gloo_message),
            "all_reduce": lambda: self.timed(lambda: self.comm.all_reduce(self.data)),
            "pair_all_reduce": lambda: self.timed(self.pair_all_reduce),
            "gloo_all_reduce": lambda: self.timed(lambda: self.dist.all_reduce(self.tensor)),
            "after_pause": lambda: self.timed(lambda: self.message(self.small), PAUSE_S),
        }
        for skipped in self.job["skip"]:
            forms.pop(skipped, None)
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        rates: dict[str, dict[str, list[float]]] = {}
        for number in range(self.job["rounds"] + 1):
            for name, form in forms.items():
                self.data.fill(1)
                taken_s = form()
                if number > 0:  # the first warms up
                    seconds[name].append(taken_s)
            for algorithm in self.job["algorithms"] if number > 0 else ():
                for streams in self.job["streams"]:
                    for way in WAYS:
                        rate_gbps = self.iperf3_gbps(streams, algorithm, way)
                        rates.setdefault(way, {}).setdefault(f"{algorithm} x {streams}", []).append(rate_gbps)
        retransmitted = sum(c["retransmitted_segments"] for c in self.comm.connections())
        return {"seconds": seconds, "iperf3_gbps": rates, "retransmitted": retransmitted}


def work(job: dict[str, Any]) -> None:
    """What every rank runs; rank 0 prints the result as JSON."""
    bench = Bench(job)
    server = subprocess.Popen(["iperf3", "-s"], stdout=subprocess.DEVNULL) if bench.rank == 2 else None
    time.sleep(0.5)
    result = bench.run()
    if bench.rank == 0:
        tell_result(result)
    bench.comm.barrier()
    if server is not None:
        server.terminate()
    bench.dist.destroy_process_group()


# --- the testbed ---


def spec_of(rate_gbps: float, round_trip_ms: float, loss_percent: float, congestion: str | None) -> Any:
    """The testbed: delay and loss are of the uplinks, half of the round trip each way."""
    queue_bytes = max(int(rate_gbps * 1e9 / 8 * max(round_trip_ms, 10) / 1e3), 200_000)  # a round trip's worth
    uplink = {"rate_gbps": rate_gbps, "queue_bytes": queue_bytes}
    if round_trip_ms:
        uplink |= {"delay_ms": round_trip_ms / 2}
    if loss_percent:
        uplink |= {"loss_percent": loss_percent}
    return spec_of_clusters("wan", 2, uplink, rate_gbps=INSIDE * rate_gbps, congestion=congestion)


def run_cell(arguments: argparse.Namespace, round_trip_ms: float, loss_percent: float) -> dict[str, Any]:
    """One round trip and loss."""
    from holmes.lab.testbed import Testbed
    from holmes.lab.testbed.check import slowness

    testbed = Testbed(spec_of(arguments.rate_gbps, round_trip_ms, loss_percent, arguments.congestion))
    with testbed.session() as session:
        job = {
            "size_bytes": arguments.size_mib * MIB, "pause_bytes": arguments.pause_mib * MIB,
            "round_trip_s": round_trip_ms / 1e3,
            "rounds": arguments.rounds, "algorithms": arguments.algorithms, "streams": arguments.streams,
            "iperf3_s": arguments.iperf3_s, "skip": arguments.skip,
            "address": str(session.spec.node("b0").nic("eth0").address.ip),
        }  # fmt: skip
        before = session.line_counters()
        outcome = session.launch([sys.executable, __file__, "--rank", json.dumps(job)]).wait(1200.0)
        late_share, overflowed = slowness(before, session.line_counters())
    return {
        "round_trip_ms": round_trip_ms,
        "loss_percent": loss_percent,
        "late_share": late_share,
        "overflowed": overflowed,
    } | results_of(outcome)[0]


def add_rates(cell: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Gbit/s over an uplink in one direction, from seconds."""
    cell["gbps"] = {}
    for form, seconds in cell["seconds"].items():
        size_mib = arguments.pause_mib if form == "after_pause" else arguments.size_mib
        # Of Gloo's all_reduce too, which carries more: times are compared, not bytes.
        cell["gbps"][form] = size_mib * MIB * 8 / statistics.median(seconds) / 1e9
    cell["best"] = {}
    for way, all_rates in cell["iperf3_gbps"].items():
        medians = {name: statistics.median(rates) for name, rates in all_rates.items()}
        cell["best"][way] = max(medians, key=medians.__getitem__)
        cell["gbps"][f"iperf3_{way}"] = medians[cell["best"][way]]


def row(cell: dict[str, Any]) -> str:
    """Of the table."""
    gbps = cell["gbps"]

    def shown(form: str) -> str:
        if form not in gbps:
            return "-"
        way = "both" if form.endswith("all_reduce") else "one"
        bests = [gbps.get(f"iperf3_{way}_{'short' if form == 'after_pause' else 'same'}"), gbps.get(f"iperf3_{way}")]
        shares = ", ".join(f"{gbps[form] / best:.0%}" for best in bests if best)
        return f"{gbps[form] * 1e3:.0f}" + (f" ({shares})" if shares else "")

    cells = [f"{cell['round_trip_ms']:g}", f"{cell['loss_percent']:g}"]
    cells += [shown(form) for form in FORMS]
    cells += [
        f"{gbps[f'iperf3_{way}'] * 1e3:.0f} ({cell['best'][way]})" if way in cell["best"] else "-"
        for way in ("one_same", "both_same", "one_short", "one", "both")
    ]
    cells.append(f"{cell['late_share']:.0%}")
    return "| " + " | ".join(cells) + " |"


FORMS = ("send", "after_pause", "all_reduce", "pair_all_reduce", "gloo_send", "gloo_all_reduce")
COLUMNS = ["round trip (ms)", "loss (%)", "send", "after a pause", "all_reduce", "of a pair", "Gloo send"]
COLUMNS += ["Gloo all_reduce", "iperf3's best, one way", "both ways", "one way, short", "seconds, one way", "both ways"]
COLUMNS += ["late frames"]
HEAD = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"


def main() -> None:
    """Runs the cells, prints the table, writes JSON and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-gbps", type=float, default=0.2, help="of the uplinks (default 0.2)")
    parser.add_argument("--round-trips-ms", type=float, nargs="+", default=[20, 80, 200])
    parser.add_argument("--loss-percent", type=float, nargs="+", default=[0, 0.01, 0.1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size-mib", type=int, default=64)
    parser.add_argument("--pause-mib", type=int, default=16, help="size of the message after a pause")
    parser.add_argument("--streams", type=int, nargs="*", default=list(STREAMS), help="of iperf3")
    parser.add_argument("--algorithms", nargs="*", default=["bbr", "cubic"], help="of iperf3")
    parser.add_argument("--iperf3-s", type=int, default=4, help="seconds of each iperf3 run, half of them uncounted")
    parser.add_argument("--congestion", help="TCP's default on the nodes (default: the kernel's)")
    parser.add_argument("--skip", nargs="*", default=[], help="forms to leave out, as gloo_send")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json and NAME.md")
    arguments = parse_or_work(parser, work)
    cells = []
    print(HEAD, flush=True)
    for round_trip_ms in arguments.round_trips_ms:
        for loss_percent in arguments.loss_percent:
            cell = run_cell(arguments, round_trip_ms, loss_percent)
            add_rates(cell, arguments)
            cells.append(cell)
            print(row(cell), flush=True)
    if arguments.save:
        save(arguments, cells)


def save(arguments: argparse.Namespace, cells: list[dict[str, Any]]) -> None:
    """results/NAME.json, with all numbers, and NAME.md, with the table."""
    write_results(
        __file__,
        arguments.save,
        heading=f"Between data centres\n\nUplinks of {arguments.rate_gbps * 1e3:g} Mbit/s, emulated; "
        f"{arguments.size_mib} MiB ({arguments.pause_mib} MiB after a pause of {PAUSE_S:g} s)",
        notes=f"Mbit/s of payload, medians of {arguments.rounds} rounds in turns; in parentheses the share of what "
        "iperf3's best carries: as many bytes from its start, and in seconds without its start.",
        ranks=4,
        settings={"rate_gbps": arguments.rate_gbps, "rounds": arguments.rounds},
        text="\n".join([HEAD, *map(row, cells)]),
        result={"cells": cells},
    )


if __name__ == "__main__":
    main()
