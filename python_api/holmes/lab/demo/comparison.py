"""Report: compares the runs, checks the claims, prints the tables, writes the result file."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from holmes.cluster.topology import RDMA_CLASSES
from holmes.lab.demo.runs import Run
from holmes.lab.demo.settings import Settings
from holmes_comm.errors import UsageError

LOSS_TOLERANCE = 1e-4
FAST_SHARE = 0.99
MOST = 0.9
SPEED_UP = 4.0
MOST_PACKET_BYTES = 4096  # of RDMA
HEADER_SHARE = 0.12  # TCP/IP headers and acknowledgements per payload byte, at most
CONTROL_BYTES_PER_STEP = 4096  # store and heartbeats, per rank


@dataclass(frozen=True)
class Check:
    """One claim: `required` ones decide the exit code."""

    claim: str
    passed: bool
    measured: str
    required: bool = True


def largest_difference(run: Run, reference: Run) -> float:
    """The largest relative difference of two runs' losses over all steps. Raises ValueError where steps are missing."""
    ours, theirs = run.losses(), reference.losses()
    if len(ours) != len(theirs):
        raise UsageError(f"run '{run.name}' reported {len(ours)} steps, '{reference.name}' {len(theirs)}")
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def check_runs(settings: Settings, single: Run, gloo: Run, ours: Run) -> list[Check]:
    """The demo's claims, measured."""
    checks = []
    for run in (gloo, ours):
        difference = largest_difference(run, single)
        checks.append(
            Check(f"{run.name}: losses equal the single process at every step", difference <= LOSS_TOLERANCE,
                  f"largest relative difference {difference:.1e}, at most {LOSS_TOLERANCE:g}")
        )  # fmt: skip
    speed_up = gloo.step_s() / ours.step_s()
    measured = f"{speed_up:.1f}x, at least {SPEED_UP:g}x"
    checks.append(Check("holmes: step faster than gloo", speed_up >= SPEED_UP, measured, required=False))
    if ours.bytes_by_group():
        checks += _path_checks(settings, ours)
    return checks


def _path_checks(settings: Settings, run: Run) -> list[Check]:
    plan = run.plan() or {}
    fast = {name for network in plan["networks"] if network["nic_class"] in RDMA_CLASSES for name in network["nics"]}
    groups, kernel, packets = run.bytes_by_group(), run.bytes_by_interface(), run.packets_by_port()
    below = {interface for port, interface in packets if port in fast}  # what Soft-RoCE sends the kernel counts there
    data = sum(sent for (group, _), sent in groups.items() if group == "dp")
    on_fast = sum(sent for (group, nic), sent in groups.items() if group == "dp" and nic in fast)
    seen_fast = sum(sent for nic, sent in kernel.items() if nic in fast | below)
    share = on_fast / data if data else 0.0
    pipeline = sum(sent for (group, nic), sent in groups.items() if group == "pp" and nic not in fast)
    ethernet = sum(sent for nic, sent in kernel.items() if nic not in fast | below)
    allowed = pipeline * (1 + HEADER_SHARE) + CONTROL_BYTES_PER_STEP * settings.steps * run.ranks
    if settings.device == "cuda":  # NCCL moves data-parallel bytes, and the engine does not count them
        on_fast_only = Check(
            "holmes: most bytes on the fast NICs", seen_fast > MOST * (seen_fast + ethernet),
            f"the kernel saw {_size(seen_fast)} there and {_size(ethernet)} on Ethernet",
        )  # fmt: skip
    else:
        on_fast_only = Check(
            "holmes: data-parallel bytes on the fast NICs", share > FAST_SHARE and seen_fast >= on_fast,
            f"{100 * share:.2f} % of {_size(data)}; the kernel saw {_size(seen_fast)} there",
        )  # fmt: skip
    by_hca = []
    if below and settings.device == "cpu":
        sent = sum(count for (port, _), count in packets.items() if port in fast)
        least = on_fast / MOST_PACKET_BYTES
        by_hca = [
            Check("holmes: the HCAs sent the data-parallel bytes", sent >= least > 0,
                  f"{sent} packets; so many bytes are {least:.0f} at least")
        ]  # fmt: skip
    return [
        on_fast_only,
        *by_hca,
        Check("holmes: only pipeline traffic and control on Ethernet", 0 < pipeline <= ethernet <= allowed,
              f"the kernel saw {_size(ethernet)}, the pipeline sent {_size(pipeline)}"),
    ]  # fmt: skip


def print_report(console: Console, settings: Settings, runs: list[Run], checks: list[Check]) -> None:
    """The tables."""
    single, gloo, _ = runs
    table = Table(title="Training", title_justify="left")
    for column in ("run", "step (median)", "samples/s", "speed-up", "final loss", "max loss difference"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for run in runs:
        table.add_row(
            run.title,
            f"{1000 * run.step_s():.0f} ms",
            f"{settings.global_batch / run.step_s():.1f}",
            "" if run is single else f"{gloo.step_s() / run.step_s():.1f}x",
            f"{run.losses()[-1]:.6f}",
            "reference" if run is single else f"{largest_difference(run, single):.1e}",
        )
    console.print(table)
    traffic = Table(title="Bytes sent per step, all nodes", title_justify="left")
    for column in ("run", "group", "NIC", "bytes", "counted by"):
        traffic.add_column(column, justify="right" if column == "bytes" else "left")
    for row in traffic_rows(settings, runs):
        sent = f"{row['packets_per_step']:.0f} packets" if "packets_per_step" in row else _size(row["bytes_per_step"])
        traffic.add_row(row["run"], row["group"], row["nic"], sent, row["counted_by"])
    console.print(traffic)
    for check in checks:
        mark = "[green]ok[/]" if check.passed else "[red]failed[/]" if check.required else "[yellow]missed[/]"
        console.print(f"{mark:>6}  {check.claim}: {check.measured}", highlight=False)


def traffic_rows(settings: Settings, runs: list[Run]) -> list[dict[str, Any]]:
    """Bytes sent per step by run, group and NIC; `group` is "all" where the kernel counted, or an HCA (packets)."""
    names = {"dp": "data parallel", "pp": "pipeline", "tp": "tensor parallel"}
    rows = []
    for run in runs:
        if run.ranks == 1:
            continue
        counted = [("engine", names[group], nic, sent) for (group, nic), sent in run.bytes_by_group().items()]
        counted += [("kernel", "all", nic, sent) for nic, sent in run.bytes_by_interface().items()]
        rows += [
            {"run": run.name, "group": group, "nic": nic, "bytes_per_step": sent / settings.steps, "counted_by": by}
            for by, group, nic, sent in sorted(counted)
            if sent
        ]
        rows += [
            {
                "run": run.name,
                "group": "all",
                "nic": port,
                "packets_per_step": sent / settings.steps,
                "counted_by": "HCA",
            }
            for (port, _), sent in sorted(run.packets_by_port().items())
            if sent
        ]
    return rows


def write_result(path: Path, settings: Settings, runs: list[Run], checks: list[Check], emulated: str) -> None:
    """Everything as JSON: settings, machine, per run the losses, times, traffic and the plan; the checks."""
    import torch

    result = {
        "emulated": emulated,
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version(),
                    "torch": torch.__version__},
        "settings": asdict(settings),
        "runs": [
            {"name": run.name, "title": run.title, "backend": run.backend, "ranks": run.ranks,
             "step_s": run.step_s(), "samples_per_s": settings.global_batch / run.step_s(),
             "losses": run.losses(), "plan": run.plan(), "steps": run.steps}
            for run in runs
        ],
        "traffic": traffic_rows(settings, runs),
        "checks": [asdict(check) for check in checks],
    }  # fmt: skip
    path.write_text(json.dumps(result, indent=1) + "\n")


def _size(count: float) -> str:
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 else f"{count / 2**10:.2f} KiB"
