"""An elastic job on the testbed, to lose nodes of and give them back: used by bench_recovery.py and the tests."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holmes.testbed import Process, Spec, TestbedSession, load_spec
from holmes.testbed.spec import parse_spec

WORKER = Path(__file__).with_name("elastic_worker.py")
STORE_NODE = "head"


def spec_with_head(name: str = "two-clusters") -> Spec:
    """A built-in testbed with one more node, on the network that all share, which serves the store and never fails."""
    import yaml

    import holmes.testbed

    path = Path(holmes.testbed.__file__).with_name("specs") / f"{name}.yaml"
    data: dict[str, Any] = yaml.safe_load(path.read_text())
    common = load_spec(name).common_network
    data["clusters"][STORE_NODE] = {"nodes": {STORE_NODE: {}}, "nics": [{"name": "eth0", "network": common}]}
    return parse_spec(f"{name}-with-{STORE_NODE}", data)


class ElasticJob:
    """One job: `start` and `kill` nodes (one rank each), `wait` for what they say. `steps`: what rank 0 reported.

    `nodes`: in the order of their places. `settings`: of the demo's model. Times are time.monotonic() seconds.
    """

    def __init__(
        self, session: TestbedSession, nodes: Sequence[str], port: int, settings: dict[str, Any], **options: Any
    ) -> None:
        self.session, self.nodes, self.port = session, list(nodes), port
        self.options = {
            "settings": settings,
            "until": settings["steps"],
            "every": 5,
            "ranks": len(nodes),
            "min_ranks": 1,
            "hold": {},
            "fault": {},
            "pause_s": 0.0,
            "heartbeat_s": 0.25,
            "dead_after_s": 3.0,
            **options,
        }
        self.lines: list[tuple[float, str, str]] = []  # (time, node, text)
        self.steps: list[dict[str, Any]] = []
        self.running: dict[str, Process] = {}
        head = session.spec.node(STORE_NODE).nic_on(session.spec.common_network)
        assert head is not None
        self.store = f"{head.address.ip}:{port}"
        command = [sys.executable, "-m", "holmes", "store", "--port", str(port)]
        self.store_process = session.spawn(STORE_NODE, command)

    def start(self, *nodes: str) -> None:
        """Starts the ranks of these nodes."""
        for node in nodes:
            env = {
                "RANK": str(self.nodes.index(node)),
                "WORLD_SIZE": str(len(self.nodes)),
                "LOCAL_WORLD_SIZE": "1",
                "LOCAL_RANK": "0",
                "HOLMES_STORE": self.store,
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, str(WORKER), json.dumps(self.options)]
            self.running[node] = self.session.spawn(
                node, command, env, on_line=lambda line, node=node: self._on_line(node, line)
            )

    def kill(self, *nodes: str) -> float:
        """SIGKILL to all of their processes; returns when."""
        for node in nodes:
            self.running.pop(node).kill(group=True)
        return time.monotonic()

    def stop(self, node: str) -> None:
        """SIGSTOP."""
        self.running[node].kill(signal.SIGSTOP, group=True)

    def resume(self, node: str) -> None:
        """SIGCONT."""
        self.running[node].kill(signal.SIGCONT, group=True)

    def wait(self, text: str, node: str | None = None, timeout_s: float = 60.0, count: int = 1) -> float:
        """Waits for the `count`-th line that contains `text` (of a node); returns when it came."""

        def found() -> list[float]:
            return [at for at, where, line in self.lines if text in line and node in (None, where)]

        if not self.session.wait_until(lambda: len(found()) >= count or self.failed() != [], timeout_s):
            raise TimeoutError(f"no {text!r} within {timeout_s} s; the last lines:\n{self.tail()}")
        if len(found()) < count:
            raise RuntimeError(f"{self.failed()} ended before {text!r}; the last lines:\n{self.tail()}")
        return found()[count - 1]

    def wait_for_step(self, step: int, generation: int, timeout_s: float = 60.0) -> float:
        """Waits until rank 0 has reported a step in a generation."""
        return self.wait(f'"step": {step}, ', timeout_s=timeout_s, count=1 + self._before(step, generation))

    def finish(self, timeout_s: float = 60.0) -> None:
        """Waits until all that run have ended well; ends the store."""
        deadline_s = time.monotonic() + timeout_s
        for node, process in self.running.items():
            code = process.wait(max(deadline_s - time.monotonic(), 0.1))
            if code != 0:
                raise RuntimeError(f"{node} ended with {code}; the last lines:\n{self.tail()}")
        self.store_process.kill(signal.SIGTERM)

    def failed(self) -> list[str]:
        """Nodes whose rank ended badly though nobody killed it."""
        return [node for node, process in self.running.items() if process.returncode]

    def losses(self) -> dict[int, float]:
        """Each step's loss; of one that was done again after a failure, the last."""
        return {entry["step"]: entry["loss"] for entry in self.steps}

    def generations(self) -> list[tuple[int, int, int]]:
        """(ranks, first step, last step) of each generation that did a step."""
        by_number: dict[int, list[dict[str, Any]]] = {}
        for entry in self.steps:
            by_number.setdefault(entry["generation"], []).append(entry)
        return [(e[0]["ranks"], e[0]["step"], e[-1]["step"]) for _, e in sorted(by_number.items())]

    def tail(self, count: int = 40) -> str:
        """The last lines of all."""
        return "\n".join(f"{node}: {line}" for _, node, line in self.lines[-count:])

    def _on_line(self, node: str, line: str) -> None:
        if line.startswith('{"step"'):
            self.steps.append(json.loads(line))
        self.lines.append((time.monotonic(), node, line))

    def _before(self, step: int, generation: int) -> int:
        return sum(entry["step"] == step and entry["generation"] < generation for entry in self.steps)
