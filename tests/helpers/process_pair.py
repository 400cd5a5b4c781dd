"""Two ranks of tests/workers/process_worker.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from paths import WORKERS

import holmes_comm

WORKER = WORKERS / "process_worker.py"


def run_pair(scenario: str, transport: str, **variables: str) -> list[dict]:
    """What two ranks, and their children, say."""
    server = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), scenario, str(server.port), str(rank), transport],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
        )
        for rank in range(2)
    ]
    said = []
    try:
        # Rank 0 first: a child of rank 1 keeps that one's output open.
        output, _ = processes[0].communicate(timeout=60)
        said += [json.loads(line) for line in output.splitlines()]
        if scenario == "forked":
            assert processes[1].stdout is not None
            said += [json.loads(processes[1].stdout.readline()) for _ in range(2)]
        else:
            output, _ = processes[1].communicate(timeout=60)
            said += [json.loads(line) for line in output.splitlines()]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return said
