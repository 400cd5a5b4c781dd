"""Runs of `holmes bench` with goals, as figures.yaml lists them: their commands, execution and verdicts."""

import json
import os
import statistics
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from holmes.lab.testbed import Testbed, TestbedError
from holmes.tools.bench import parse_bytes

FIGURES = Path(__file__).with_name("figures.yaml")
UPPER_BOUNDS = ("time_us", "cores")
MEDIAN_KEYS = ("time_us", "p50_us", "algorithm_gb_per_s", "bus_gb_per_s", "cores", "gb_per_core_s", "foreign_cores")
IPERF_PORT = 5201
IPERF_S = 3.0


@dataclass(frozen=True)
class Goal:
    """One promised number: `reference` is a peer, "iperf3" or an upper bound's name."""

    reference: str
    operation: str
    size: str
    bound: float

    def value(self, row: dict[str, Any]) -> float:
        """Returns what the row has of it."""
        if self.reference == "iperf3":
            return row["share_of_iperf3"]
        return row[self.reference] if self.reference in UPPER_BOUNDS else row["ratios"][self.reference]

    def met(self, row: dict[str, Any]) -> bool:
        """Whether the row keeps the promise."""
        value = self.value(row)
        right = row["wrong_elements"] == 0
        return right and (value <= self.bound if self.reference in UPPER_BOUNDS else value >= self.bound)


@dataclass(frozen=True)
class Run:
    """One entry of figures.yaml."""

    name: str
    title: str
    operations: list[str]
    goals: dict[str, dict[str, Any]]
    bench: list[Any] = field(default_factory=list)
    testbed: str | None = None
    iperf3: list[str] = field(default_factory=list)

    @property
    def beside_iperf3(self) -> bool:
        """Whether iperf3 takes turns with it."""
        return "iperf3" in self.goals

    def each_goal(self) -> Iterator[Goal]:
        """Yields the goals one by one."""
        for reference, sizes in self.goals.items():
            for size, bounds in sizes.items():
                each = bounds if isinstance(bounds, list) else [bounds] * len(self.operations)
                for operation, bound in zip(self.operations, each, strict=True):
                    yield Goal(reference, operation, str(size), bound)

    def sizes(self) -> list[str]:
        """Returns the sizes, ascending."""
        return sorted({goal.size for goal in self.each_goal()}, key=parse_bytes)

    def command(self, seconds: float, rounds: int) -> list[str]:
        """Returns the `holmes bench` command, without its output."""
        peers = ["--peers", "none"] if self.beside_iperf3 else []
        nodes = ["--testbed", self.testbed] if self.testbed else []
        timing = ["--seconds", f"{seconds:g}", "--rounds", str(rounds)]
        options = [*peers, *nodes, *map(str, self.bench), *timing]
        return ["holmes", "bench", *self.operations, "--sizes", ",".join(self.sizes()), *options]

    def execute(self, path: Path, seconds: float, rounds: int) -> dict[str, Any]:
        """Runs it, writes its JSON to `path` and returns it. Raises CalledProcessError where a result was wrong."""
        if not self.beside_iperf3:
            return _bench(self.command(seconds, rounds), path)
        # Rounds of one run each, so that iperf3 can take turns with them.
        documents, goodputs = [], []
        for _ in range(rounds):
            goodputs.append(iperf3_gb_per_s(self.testbed, self.iperf3))
            documents.append(_bench(self.command(seconds, 1), path))
        document = merge(documents, goodputs)
        document["command"] = " ".join(self.command(seconds, 1))
        path.write_text(json.dumps(document, indent=1) + "\n")
        return document


def load_runs(path: Path = FIGURES) -> list[Run]:
    """Reads all runs. Raises TypeError or ValueError where an entry is malformed."""
    runs = [Run(**entry) for entry in yaml.safe_load(path.read_text())]
    for run in runs:
        for _ in run.each_goal():  # the right number of bounds
            pass
    return runs


def execute_matrix(path: Path, seconds: float, rounds: int) -> None:
    """Runs `holmes bench --matrix`, writes its JSON to `path` and its picture beside it. What fails is in the JSON."""
    command = ["holmes", "bench", "--matrix", "--seconds", f"{seconds:g}", "--rounds", str(rounds)]
    _run([*command, "--json", os.path.relpath(path), "--plot", os.path.relpath(path.with_suffix(".png"))], check=False)


def _bench(command: list[str], path: Path) -> dict[str, Any]:
    _run([*command, "--json", os.path.relpath(path)], check=True)
    return json.loads(path.read_text())


def _run(command: list[str], check: bool) -> None:
    environment = {**os.environ, "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])}
    print("$", " ".join(command), flush=True)
    subprocess.run(command, check=check, env=environment)


def iperf3_gb_per_s(spec: str | None, options: list[str]) -> float:
    """Returns iperf3's goodput from the first to the last node of a testbed, in 1e9 bytes per second."""
    if spec is None:
        raise ValueError("iperf3 runs on emulated nodes only; the run names no testbed")
    with Testbed(spec).session() as session:
        first, last = session.spec.nodes[0], session.spec.nodes[-1]
        address = str(last.nic_on(session.spec.common_network).address.ip)
        server = session.spawn(last.name, ["iperf3", "-s", "-1", "--forceflush", "-p", str(IPERF_PORT)])
        server.wait_for_line("listening", 10)
        client = ["iperf3", "-c", address, "-p", str(IPERF_PORT), "-t", str(IPERF_S), "-O", "1", "-J", *options]
        answer = json.loads(session.exec(first.name, client, timeout_s=IPERF_S + 20))
    if "error" in answer:
        raise TestbedError(f"iperf3: {answer['error']}")
    goodput = answer["end"]["sum_received"]["bits_per_second"] / 8e9
    print(f"iperf3: {goodput:.4f} GB/s", flush=True)
    return goodput


def merge(documents: list[dict[str, Any]], goodputs: list[float]) -> dict[str, Any]:
    """Returns one document of several with one round each: medians, and each round's share of its iperf3 goodput."""
    merged = documents[0]
    for index, row in enumerate(merged["rows"]):
        rows = [document["rows"][index] for document in documents]
        shares = [each["bus_gb_per_s"] / goodput for each, goodput in zip(rows, goodputs, strict=True)]
        for key in (
            "time_us",
            "p50_us",
            "algorithm_gb_per_s",
            "bus_gb_per_s",
            "cores",
            "gb_per_core_s",
            "foreign_cores",
        ):
            values = [each[key] for each in rows if each[key] is not None]
            row[key] = statistics.median(values) if values else None
        row["p99_us"] = max(each["p99_us"] for each in rows)
        row["wrong_elements"] = sum(each["wrong_elements"] for each in rows)
        row["calls"] = sum(each["calls"] for each in rows)
        row["round_times_us"] = [each["time_us"] for each in rows]
        row["share_of_iperf3"] = statistics.median(shares)
    merged["iperf3_gb_per_s"] = goodputs
    return merged
