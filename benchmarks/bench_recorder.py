"""What the flight recorder costs a small all_reduce: `python benchmarks/bench_recorder.py [--json FILE]`.

Two ranks (processes), each with two communicators that differ only in HOLMES_FLIGHT_RECORDER (256 and 0), used in turns
of some milliseconds: what else the machine does meets both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

import holmes_comm

TURNS = 100
CALLS_PER_TURN = 200
BYTES = 1024


def make(store: Any, rank: int, transport: str, recorded: int) -> Any:
    os.environ["HOLMES_FLIGHT_RECORDER"] = str(recorded)
    nics = holmes_comm.NicSelection(nic_class="loopback")
    name = f"{transport}-{recorded}"
    return holmes_comm.init(store, rank, 2, nics=nics, transport=transport, name=name, timeout_s=60)


def turns_us(store: Any, rank: int, transport: str) -> dict[str, list[float]]:
    """Microseconds of one call, by turn, with and without the recorder."""
    comms = {"on": make(store, rank, transport, 256), "off": make(store, rank, transport, 0)}
    data = np.zeros(BYTES // 4, "float32")
    found: dict[str, list[float]] = {"on": [], "off": []}
    for turn in range(TURNS + 5):
        order = ["on", "off"] if turn % 2 else ["off", "on"]
        for kind in order:
            comm = comms[kind]
            comm.barrier()
            start = time.perf_counter()
            for _ in range(CALLS_PER_TURN):
                comm.all_reduce(data)
            if turn >= 5:
                found[kind].append((time.perf_counter() - start) / CALLS_PER_TURN * 1e6)
    return found


def measure(transport: str) -> dict[str, Any]:
    store = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
    other = subprocess.Popen([sys.executable, __file__, "--follow", str(store.port), transport])
    try:
        found = turns_us(store, 0, transport)
    finally:
        other.wait(60)
    ratios = sorted(on / off for on, off in zip(found["on"], found["off"], strict=True))
    return {
        "transport": transport,
        "bytes": BYTES,
        "recorded_us": round(statistics.median(found["on"]), 2),
        "unrecorded_us": round(statistics.median(found["off"]), 2),
        "median_ratio": round(statistics.median(ratios), 4),
        "quartiles_of_ratio": [round(ratios[len(ratios) // 4], 4), round(ratios[3 * len(ratios) // 4], 4)],
        "best_ratio": round(min(found["on"]) / min(found["off"]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--follow", nargs=2, metavar=("PORT", "TRANSPORT"))
    options = parser.parse_args()
    if options.follow:
        port, transport = options.follow
        turns_us(holmes_comm.TcpStore("127.0.0.1", int(port), is_server=False), 1, transport)
        return
    results = [measure(transport) for transport in ("shm", "tcp")]
    machine = {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": str(date.today()),
        "command": "python benchmarks/bench_recorder.py",
    }
    text = json.dumps({"machine": machine, "results": results}, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


main()
