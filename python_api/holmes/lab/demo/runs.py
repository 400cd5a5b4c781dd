"""Runs: starts the rank scripts of the three runs and collects what they report."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holmes.lab.demo.settings import MARK, Settings
from holmes_comm.errors import HolmesError

WARM_UP_STEPS = 2
#: Of a run that failed: torch's stack of a rank that fell later must not hide what another said first.
LAST_LINES_PER_RANK = 60

#: Runs a command on every node (command, environment, called with each line) and returns the exit code.
Launch = Callable[[Sequence[str], Mapping[str, str], Callable[[str], None]], int]


class RunFailed(HolmesError):
    """A run ended with an error; the message holds the end of its output."""


@dataclass
class Run:
    """One training run: how it is started and, once `execute` returned, what its ranks reported."""

    name: str
    title: str
    script: str
    backend: str
    ranks: int
    env: Mapping[str, str] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)
    output: list[str] = field(default_factory=list)

    def execute(self, settings: Settings, launch: Launch, progress: Callable[[int], None]) -> None:
        """Trains; calls `progress(steps done)`. Raises RunFailed where a rank fails or does not report to the end."""
        command = [sys.executable, "-m", self.script, "--settings", settings.to_json(), "--backend", self.backend]
        done: dict[int, int] = {}

        def on_line(line: str) -> None:
            if not line.startswith(MARK):
                self.output.append(line)
                return
            report = json.loads(line[len(MARK) :])
            if "step" in report:
                self.steps.append(report)
                done[report["rank"]] = report["step"] + 1
                if len(done) == self.ranks:
                    progress(min(done.values()))
            else:
                self.ends.append(report)

        code = launch(command, {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **self.env}, on_line)
        if code != 0 or len(self.ends) != self.ranks:
            last = "\n".join(self.output[-LAST_LINES_PER_RANK * self.ranks :])
            raise RunFailed(f"run '{self.title}' ended with exit code {code}; the end of its output:\n{last}")

    def losses(self) -> list[float]:
        """Each step's loss over the global batch: the mean of the ranks that have one (their shares are equal)."""
        by_step: dict[int, list[float]] = {}
        for report in self.steps:
            if report["loss"] is not None:
                by_step.setdefault(report["step"], []).append(report["loss"])
        return [statistics.fmean(by_step[step]) for step in sorted(by_step)]

    def step_s(self) -> float:
        """The median over the steps after warm-up of the slowest rank's time."""
        slowest: dict[int, float] = {}
        for report in self.steps:
            slowest[report["step"]] = max(report["step_s"], slowest.get(report["step"], 0.0))
        timed = [slowest[step] for step in sorted(slowest)]
        return statistics.median(timed[WARM_UP_STEPS:] or timed)

    def bytes_by_group(self) -> dict[tuple[str, str], int]:
        """(group, NIC) -> bytes that all ranks' connections of that group sent, as the engine counts."""
        entries = [entry for end in self.ends for entry in end["groups"]]
        return _sum((entry["group"], entry["nic"], entry["sent_bytes"]) for entry in entries)

    def bytes_by_interface(self) -> dict[str, int]:
        """Interface -> bytes that all nodes sent on it, as the kernel counts: with headers and acknowledgements."""
        counted = _sum((name, "", sent) for end in self.ends for name, sent in end["interfaces"].items())
        return {name: sent for (name, _), sent in counted.items() if name != "lo" and sent}

    def packets_by_port(self) -> dict[tuple[str, str], int]:
        """(RDMA port, its interface or "") -> packets that all nodes sent, as the HCAs count."""
        return _sum((hca["port"], hca["interface"], hca["packets"]) for end in self.ends for hca in end["hcas"])

    def plan(self) -> dict[str, Any] | None:
        """The plan this run followed, as `Plan.to_dict` gives it; None for a run without one."""
        return next((end["plan"] for end in self.ends if end.get("plan")), None)


def launch_here(command: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None]) -> int:
    """One process on this machine, outside the testbed."""
    with subprocess.Popen(
        command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                on_line(line.rstrip("\n"))
        except BaseException:  # Ctrl-C: Popen waits for it, but does not end it
            process.kill()
            raise
    return process.returncode


def _sum(entries: Any) -> dict[tuple[str, str], int]:
    total: dict[tuple[str, str], int] = {}
    for first, second, count in entries:
        total[first, second] = total.get((first, second), 0) + count
    return total
