"""A link whose rate halves and comes back: `python benchmarks/bench_wan_changes.py`.

Two clusters of two nodes, joined by uplinks with a rate and a round trip. One form after the other runs without a
pause, each on the same links: messages of Holmes, its hierarchical all_reduce, and plain TCP connections (bbr) for
comparison. Meanwhile the rate of cluster a's uplink, both directions, halves and comes back. Printed are, by second,
what the link carries at most, what passed over it from a to b (as its device counts: headers and what was sent again
included) and what programs of cluster b received of that; the seconds until 90 % of what was received before the
change, times the change, were reached for two seconds; and what the engine's log said of it. All results are looked at.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rank_jobs import parse_or_work
from result_files import write_results

MIB = 2**20
SAMPLE_S = 0.1
FORMS = ("message", "all_reduce", "tcp")
TCP_PORT = 29600
REACHED = 0.9
REACHED_FOR_S = 2.0
#: Of the time before a change, what the rate before is taken from.
STEADY_S = 5.0
#: The end of the uplink that sends from cluster a, see `fabric.py`.
UPLINK_DEVICE = "up0-0"

#: Seconds (monotonic), and bytes so far.
Sample = tuple[float, float]


# --- a rank: 0 and 1 in cluster a, 2 and 3 in cluster b ---


class Rank:
    """One node's part."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Connects. Collective."""
        import holmes_comm

        self.job = job
        self.rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = holmes_comm.TcpStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, is_server=self.rank == 0
        )
        self.metrics = holmes_comm.metrics
        self.comm = holmes_comm.init(
            store,
            self.rank,
            size,
            nics=holmes_comm.NicSelection(names=("eth0",)),
            name="wan",
            cluster="ab"[self.rank // 2],
            hierarchical_min_bytes=0,
            timeout_s=60.0,
        )
        self.count = job["size_bytes"] // 4
        self.end_s = 0.0
        self.tcp_bytes = 0.0

    def received_bytes(self) -> float:
        """By the engine, from the other cluster, so far."""
        return float(sum(nic.received_bytes for nic in self.metrics().nics if nic.path == "inter"))

    def sampled(self, run: Callable[[], bool], received: Callable[[], float]) -> tuple[bool, list[Sample]]:
        """Runs it and looks at what was received meanwhile."""
        samples, ended = [], threading.Event()

        def sample() -> None:
            while not ended.wait(SAMPLE_S):
                samples.append((time.monotonic(), received()))

        thread = threading.Thread(target=sample)
        thread.start()
        right = run()
        ended.set()
        thread.join()
        return right, samples

    def message(self) -> bool:
        """From rank 0 to rank 2, until it is time. Returns whether they came as they were sent."""
        if self.rank % 2:
            return True
        data, right, number = np.arange(self.count, dtype="float32"), True, 0
        expected = data[1:].copy()
        while True:
            if self.rank == 0:
                data[0] = -1 if time.monotonic() > self.end_s else number
                self.comm.send(data, 2)
            else:
                data[:] = 0
                self.comm.recv(data, 0)
                right &= data[0] in (-1, number) and bool((data[1:] == expected).all())
            number += 1
            if data[0] == -1:
                return right

    def all_reduce(self) -> bool:
        """Of all ranks, until it is time. Returns whether the sums are right."""
        data, right, number = np.empty(self.count, "float32"), True, 0
        while True:
            data[:] = self.rank + number % 1000
            data[0] = self.rank == 0 and time.monotonic() > self.end_s
            self.comm.all_reduce(data)
            right &= bool((data[1:] == 6 + 4 * (number % 1000)).all())
            number += 1
            if data[0]:
                return right

    def tcp(self) -> bool:
        """Plain connections from rank 0 to rank 2, until it is time."""
        if self.rank == 2:
            threads = [threading.Thread(target=self._drain, args=(peer,)) for peer in self._accept()]
        elif self.rank == 0:
            threads = [threading.Thread(target=self._fill) for _ in range(self.job["tcp_streams"])]
        else:
            threads = []
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return True

    def _accept(self) -> list[socket.socket]:
        with socket.create_server(("", TCP_PORT)) as server:
            return [server.accept()[0] for _ in range(self.job["tcp_streams"])]

    def _fill(self) -> None:
        time.sleep(0.5)  # until the other side listens
        with socket.create_connection((self.job["address"], TCP_PORT), 10) as stream:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.job["tcp_congestion"].encode())
            piece = bytes(256 * 1024)
            while time.monotonic() < self.end_s:
                stream.sendall(piece)

    def _drain(self, stream: socket.socket) -> None:
        piece = bytearray(256 * 1024)
        with stream:
            while got := stream.recv_into(piece):
                self.tcp_bytes += got  # of threads that hold the interpreter: good enough for a look

    def run(self, form: str) -> dict[str, Any]:
        """One form. Collective."""
        self.comm.barrier()
        self.end_s = time.monotonic() + self.job["duration_s"]
        if self.rank == 0:
            print(f"BEGIN {form}", flush=True)
        received = (lambda: self.tcp_bytes) if form == "tcp" else self.received_bytes
        right, samples = self.sampled(getattr(self, form), received)
        self.comm.barrier()
        return {"right": right, "samples": samples}


def work(job: dict[str, Any]) -> None:
    """What every rank runs; those of cluster b print what they received."""
    rank = Rank(job)
    for form in job["forms"]:
        found = rank.run(form)
        print(f"DONE {form} " + json.dumps(found if rank.rank >= 2 else {"right": found["right"]}), flush=True)
        rank.comm.barrier()


# --- the testbed ---


def spec_of(rate_gbps: float, round_trip_ms: float, loss_percent: float) -> Any:
    """As in bench_wan: delay and loss are of the uplinks, which have a queue of a round trip."""
    from bench_wan import spec_of as still_spec_of

    return still_spec_of(rate_gbps, round_trip_ms, loss_percent, None)


#: Prints when, and what the device has sent so far.
WATCH_DEVICE = """
import sys, time
while True:
    fields = next(line for line in open("/proc/net/dev") if line.strip().startswith(sys.argv[1] + ":")).split()
    print(time.monotonic(), fields[9], flush=True)
    time.sleep(float(sys.argv[2]))
"""


def run_form(session: Any, job: Any, form: str, arguments: argparse.Namespace, rate_gbps: float) -> dict[str, Any]:
    """Waits for a form to begin, changes the link, and returns what was carried."""
    from holmes.lab.testbed.check import slowness, too_slow

    def times_of(lines: Sequence[str], text: str) -> Any:
        return [json.loads(line.split(text, 1)[1]) for line in lines if text in line]

    job.processes[0].wait_for_line(f"BEGIN {form}", 120.0)
    before = session.line_counters()
    watch = session.spawn(None, [sys.executable, "-c", WATCH_DEVICE, UPLINK_DEVICE, str(SAMPLE_S)])
    begun_s, changed_s = time.monotonic(), []
    for pause_s, share in ((arguments.before_s, 0.5), (arguments.half_s, 1.0)):
        time.sleep(pause_s)
        session.change_link("eth/a", rate_gbps=rate_gbps * share)
        changed_s.append(time.monotonic())
    found = []
    for process in job.processes:
        process.wait_for_line(f"DONE {form} ", 120.0)
        found += times_of(list(process.lines), f"DONE {form} ")
    watch.kill()
    slow = slowness(before, session.line_counters())
    passed = [(float(at), float(sent)) for at, sent in (line.split() for line in watch.lines)]
    return {
        "begun_s": begun_s,
        "changed_s": changed_s,
        "right": all(one["right"] for one in found),
        "passed": passed,
        "received": [one["samples"] for one in found if one.get("samples")],
        "late_share": slow[0],
        "too_slow": too_slow(*slow),
    }


TOLD = re.compile(r"info: (.* carries \d+ Mbit/s, before \d+; .*)")


def run(arguments: argparse.Namespace, rate_gbps: float, round_trip_ms: float) -> dict[str, Any]:
    """All forms over one link."""
    from holmes.lab.testbed import Testbed

    told: list[tuple[float, int, str]] = []

    def listen(rank: int, _: str, line: str) -> None:
        if match := TOLD.search(line):
            told.append((time.monotonic(), rank, match[1]))

    with Testbed(spec_of(rate_gbps, round_trip_ms, arguments.loss_percent)).session() as session:
        settings = {
            "size_bytes": arguments.size_mib * MIB, "forms": arguments.forms, "tcp_streams": arguments.tcp_streams,
            "tcp_congestion": arguments.tcp_congestion,
            "duration_s": arguments.before_s + arguments.half_s + arguments.after_s,
            "address": str(session.spec.node("b0").nic("eth0").address.ip),
        }  # fmt: skip
        job = session.launch(
            [sys.executable, __file__, "--rank", json.dumps(settings)], env={"HOLMES_LOG": "info"}, on_line=listen
        )
        forms = {form: run_form(session, job, form, arguments, rate_gbps) for form in arguments.forms}
        outcome = job.wait(120.0)
    if outcome.returncode != 0:
        raise SystemExit("\n".join(line[:300] for lines in outcome.outputs.values() for line in lines))
    for name, form in forms.items():
        ends_s = form["begun_s"] + settings["duration_s"]
        form["told"] = [(at, rank, text) for at, rank, text in told if form["begun_s"] <= at <= ends_s]
        if not form["right"]:
            raise SystemExit(f"{name}: a result is wrong")
    return {"rate_gbps": rate_gbps, "round_trip_ms": round_trip_ms, "forms": forms}


# --- what came of it ---


def bytes_at(samples: Sequence[Sample], at_s: float) -> float:
    """So far, between two looks in proportion."""
    return float(np.interp(at_s, [at for at, _ in samples], [size for _, size in samples]))


def megabits(series: Sequence[Sequence[Sample]], from_s: float, to_s: float) -> float:
    """Per second, of all of them together."""
    total = sum(bytes_at(samples, to_s) - bytes_at(samples, from_s) for samples in series)
    return 8e-6 * total / (to_s - from_s)


def until_reached(series: Sequence[Sequence[Sample]], from_s: float, to_s: float, wanted: float) -> float | None:
    """Seconds until `wanted` is carried for REACHED_FOR_S; None: not at all."""
    steps = np.arange(from_s, to_s - REACHED_FOR_S, SAMPLE_S)
    reached = (at for at in steps if megabits(series, at, at + REACHED_FOR_S) >= wanted)
    first = next(reached, None)
    return None if first is None else float(first - from_s)


def judge(form: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """What was carried before, meanwhile and afterwards, and the seconds until it followed."""
    halved_s, back_s = form["changed_s"]
    end_s = form["begun_s"] + arguments.before_s + arguments.half_s + arguments.after_s
    series = form["received"]
    full = megabits(series, halved_s - STEADY_S, halved_s)
    return {
        "before": full,
        "half": megabits(series, back_s - STEADY_S, back_s),
        "after": megabits(series, end_s - STEADY_S, end_s),
        "halved_after_s": until_reached(series, halved_s, back_s, REACHED * full / 2),
        "back_after_s": until_reached(series, back_s, end_s, REACHED * full),
    }


def by_second(result: dict[str, Any], arguments: argparse.Namespace) -> str:
    """A table: the link's rate, and by form what passed and what was received, Mbit/s."""
    forms = result["forms"]
    rate = result["rate_gbps"] * 1e3
    seconds = int(arguments.before_s + arguments.half_s + arguments.after_s)
    lines = ["| second | link | " + " | ".join(f"{name} passed | received" for name in forms) + " |"]
    lines.append("|" + " ---: |" * (2 + 2 * len(forms)))
    for second in range(seconds):
        half = arguments.before_s <= second < arguments.before_s + arguments.half_s
        cells = [str(second), f"{rate / 2 if half else rate:g}"]
        for form in forms.values():
            from_s = form["begun_s"] + second
            cells += [f"{megabits(series, from_s, from_s + 1):.0f}" for series in ([form["passed"]], form["received"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


HEAD = """| link | form | before | half | after | 90 % of the half after (s) | 90 % again after (s) | late frames |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"""


def summary(result: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    """A line for each form."""

    def shown_s(seconds: float | None) -> str:
        return "never" if seconds is None else f"{seconds:.1f}"

    lines = []
    for name, form in result["forms"].items():
        found = judge(form, arguments)
        cells = [f"{result['rate_gbps'] * 1e3:g} Mbit/s, {result['round_trip_ms']:g} ms", name]
        cells += [f"{found[key]:.0f}" for key in ("before", "half", "after")]
        cells += [shown_s(found["halved_after_s"]), shown_s(found["back_after_s"]), f"{form['late_share']:.1%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def said(result: dict[str, Any]) -> list[str]:
    """What the engine told of the changes, and when."""
    return [
        f"{name}, {at - form['begun_s']:.1f} s, rank {rank}: {text}"
        for name, form in result["forms"].items()
        for at, rank, text in form["told"]
    ]


def main() -> None:
    """Runs all links, prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates-gbps", type=float, nargs="+", default=[0.2, 1], help="of the uplinks")
    parser.add_argument("--round-trips-ms", type=float, nargs="+", default=[20, 80])
    parser.add_argument("--loss-percent", type=float, default=0)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--before-s", type=float, default=10, help="at the full rate")
    parser.add_argument("--half-s", type=float, default=15, help="at half of it")
    parser.add_argument("--after-s", type=float, default=15, help="at the full rate again")
    parser.add_argument("--size-mib", type=int, default=16, help="of a message and of an all_reduce")
    parser.add_argument("--tcp-streams", type=int, default=4, help="plain connections")
    parser.add_argument("--tcp-congestion", default="bbr", help="of the plain connections")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json and NAME.md")
    arguments = parse_or_work(parser, work)
    results, rows = [], []
    for rate_gbps in arguments.rates_gbps:
        for round_trip_ms in arguments.round_trips_ms:
            result = run(arguments, rate_gbps, round_trip_ms)
            results.append(result)
            rows += summary(result, arguments)
            print("\n".join([by_second(result, arguments), "", *said(result), ""]), flush=True)
    text = "\n".join([HEAD, *rows])
    print(text)
    if arguments.save:
        tables = "\n\n".join(by_second(result, arguments) for result in results)
        write_results(
            __file__,
            arguments.save,
            heading="A link whose rate halves and comes back\n\nUplinks of two emulated clusters of two nodes",
            notes="Mbit/s; seconds count from when a form began.",
            ranks=4,
            settings={"half_s": arguments.half_s},
            text=f"{text}\n\n{tables}",
            result={"links": results},
        )


if __name__ == "__main__":
    main()
