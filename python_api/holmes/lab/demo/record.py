"""Record: what a rank reports, as lines of JSON on stdout: one per step, and one at the end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from holmes.lab.demo.settings import MARK, Settings


class Recorder:
    """Step times, losses, the spans of one step and byte counters of this rank. Times are CLOCK_MONOTONIC seconds.

    `groups` are names and process groups whose connections are counted (backend "holmes"); `plan` goes into the report
    as it is. Call from one thread; `add` may come from any.
    """

    def __init__(
        self,
        settings: Settings,
        groups: Sequence[tuple[str, dist.ProcessGroup | None]] = (),
        plan: dict[str, Any] | None = None,
    ) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self._settings = settings
        self._groups = groups
        self._plan = plan
        self._step = -1
        self._spans: list[dict[str, Any]] = []
        self._busy_s = 0.0  # forward and backward of this step

    def train(self, step: Callable[[int], float | None]) -> None:
        """Runs `step(number)`, which returns this rank's mean loss (None: not on this rank), for all steps; reports."""
        interfaces, connections, packets = interface_bytes(), self._connection_bytes(), hca_packets()
        for number in range(self._settings.steps):
            self._step, self._busy_s = number, 0.0
            started = time.monotonic()
            loss = step(number)
            ended = time.monotonic()
            self.add("step", started, ended)
            _print({"rank": self.rank, "step": number, "loss": loss, "step_s": ended - started, "busy_s": self._busy_s})
        sent = _difference(interface_bytes(), interfaces)
        packets = _difference(hca_packets(), packets)
        by_group = _difference(self._connection_bytes(), connections)
        _print(
            {
                "rank": self.rank,
                "node": os.environ.get("HOLMES_HOSTNAME", ""),
                "interfaces": sent,
                "hcas": [{"port": port, "interface": netdev, "packets": n} for (port, netdev), n in packets.items()],
                "groups": [{"group": group, "nic": nic, "sent_bytes": n} for (group, nic), n in by_group.items()],
                "plan": self._plan,
                "spans": self._spans,
            }
        )

    def add(self, kind: str, started: float, ended: float | None = None) -> None:
        """A span of `kind` that began at `started` and ends now, kept when this is the step of the picture."""
        ended = ended or time.monotonic()
        if kind in ("forward", "backward"):
            self._busy_s += ended - started
        if self._step == self._settings.timeline_step:
            self._spans.append({"kind": kind, "start_s": started, "end_s": ended})

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Times its body."""
        started = time.monotonic()
        yield
        self.add(kind, started)

    def _connection_bytes(self) -> dict[tuple[str, str], int]:
        """(group, NIC or "shm") -> bytes sent."""
        counted: dict[tuple[str, str], int] = {}
        if self._groups:
            from holmes_comm.torch_backend import connections

            for name, group in self._groups:
                for connection in connections(group):
                    key = (name, connection["interface"] or connection["transport"])
                    counted[key] = counted.get(key, 0) + connection["sent_bytes"]
        return counted


def interface_bytes() -> dict[str, int]:
    """Interface -> bytes sent since boot, as the kernel counts them in this network namespace."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return {name.strip(): int(numbers.split()[8]) for name, numbers in (line.split(":") for line in lines)}


def hca_packets() -> dict[tuple[str, str], int]:
    """(RDMA port, its interface or "") -> packets sent, as the HCA counts them; of this host's ports that tell."""
    counted = {}
    for folder in Path(os.environ.get("HOLMES_SYSFS_ROOT") or "/sys").glob("class/infiniband/*/ports/*"):
        netdev = _read(folder / "gid_attrs/ndevs/0") or ""
        for counter in ("counters/port_xmit_packets", "hw_counters/sent_pkts"):  # InfiniBand's and most; Soft-RoCE's
            if (packets := _read(folder / counter)) is not None:
                counted[f"{folder.parent.parent.name}:{folder.name}", netdev] = int(packets)
                break
    return counted


def _read(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:  # some are there and say nothing
        return None


def _difference(after: dict[Any, int], before: dict[Any, int]) -> dict[Any, int]:
    return {key: value - before.get(key, 0) for key, value in after.items()}


def _print(report: dict[str, Any]) -> None:
    print(MARK + json.dumps(report), flush=True)
