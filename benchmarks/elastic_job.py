"""Elastic jobs on the testbed, to lose nodes of and give them back: used by bench_recovery.py and the tests."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holmes.lab.stress.elastic.nodes import STORE_NODE, spec_with_store
from holmes.lab.testbed import Testbed, TestbedSession

LAST_STEPS = 4  # of a generation, in which is looked what is open
SUPERVISOR = Path(__file__).with_name("elastic_node.py")
# Buffered, so that each line is one write: a supervisor and its child write to the same pipe.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}


class ElasticNodes:
    """A testbed with a supervisor on each node, which forks ranks. Leave it to end all. `folder`: for files.

    `lines`: what nodes said, as (time.monotonic() seconds, node, text).
    """

    def __init__(self, folder: Path) -> None:
        self.session: TestbedSession = Testbed(spec_with_store()).session()
        self.spec = self.session.spec
        self.folder = folder
        self.lines: list[tuple[float, str, str]] = []
        self.children: dict[tuple[str, int], int | None] = {}  # (node, number) -> exit code
        self._pids: dict[tuple[str, int], int] = {}
        self._requests = {node.name: 0 for node in self.spec.nodes}

    def __enter__(self) -> ElasticNodes:
        """Starts the supervisors."""
        self.session.__enter__()
        for node in self._requests:
            (self.folder / node).mkdir()
            modules = [] if node == STORE_NODE else ["elastic_worker"]
            command = [sys.executable, str(SUPERVISOR), str(self.folder / node), *modules]
            self.session.spawn(node, command, ENVIRONMENT, on_line=lambda line, node=node: self._on_line(node, line))
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends everything."""
        self.session.__exit__(*error)

    def fork(self, node: str, options: dict[str, Any]) -> int:
        """Asks a node's supervisor for a child; returns its number."""
        number = self._requests[node]
        self._requests[node] += 1
        self.children[node, number] = None
        hidden = self.folder / node / f"{number}.part"
        hidden.write_text(json.dumps(options))
        hidden.rename(hidden.with_suffix(".json"))
        return number

    def kill(self, node: str, number: int, signal: str = "KILL") -> None:
        """Sends a signal to all processes of a child."""
        self.wait_until(lambda: (node, number) in self._pids, 120)
        self.session.exec(None, ["kill", f"-{signal}", "--", f"-{self._pids[node, number]}"])

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Raises TimeoutError with the last lines of all after `timeout_s`."""
        if not self.session.wait_until(condition, timeout_s):
            last = "\n".join(f"{node}: {line}" for _, node, line in self.lines[-60:])
            raise TimeoutError(f"not within {timeout_s} s; the last lines:\n{last}")

    def _on_line(self, node: str, line: str) -> None:
        if line.startswith('{"started"'):
            entry = json.loads(line)
            self._pids[node, entry["started"]] = entry["pid"]
        elif line.startswith('{"ended"'):
            entry = json.loads(line)
            self.children[node, entry["ended"]] = entry["code"]
        self.lines.append((time.monotonic(), node, line))


class ElasticJob:
    """One job: `start` and `kill` nodes (one rank each), `wait` for what they say. One after another on its nodes.

    `nodes`: in the order of their places. `settings`: of the demo's model. `steps`: what rank 0 reported.
    """

    def __init__(
        self, nodes: ElasticNodes, places: Sequence[str], port: int, settings: dict[str, Any], **options: Any
    ) -> None:
        self.nodes, self.places = nodes, list(places)
        self._first_line = len(nodes.lines)
        self._last_line: int | None = None
        self.running: dict[str, int] = {}
        self.options = {
            "settings": settings,
            "until": settings["steps"],
            "every": 5,
            "ranks": len(places),
            "hold": {},
            "fault": {},
            "heartbeat_s": 0.25,
            "dead_after_s": 3.0,
            "lease_s": 2.0,
            "min_ranks": 2,
            **options,
        }
        head = nodes.spec.node(STORE_NODE).nic_on(nodes.spec.common_network)
        assert head is not None
        self.store = f"{head.address.ip}:{port}"
        self._server = nodes.fork(STORE_NODE, {"serve": port, "env": {}})

    @property
    def lines(self) -> list[tuple[float, str, str]]:
        """What this job said."""
        return self.nodes.lines[self._first_line : self._last_line]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What rank 0 reported."""
        return [json.loads(line) for _, _, line in self.lines if line.startswith('{"step"')]

    def start(self, *nodes: str) -> None:
        """Starts the ranks of these nodes."""
        for node in nodes:
            place = {"RANK": str(self.places.index(node)), "WORLD_SIZE": str(len(self.places))}
            env = {**place, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "HOLMES_STORE": self.store}
            self.running[node] = self.nodes.fork(node, {**self.options, "env": env})

    def kill(self, *nodes: str, signal: str = "KILL") -> float:
        """Sends a signal to all of their processes; returns when. After KILL they no longer count as running."""
        at_s = time.monotonic()
        for node in nodes:
            self.nodes.kill(node, self.running.pop(node) if signal == "KILL" else self.running[node], signal)
        return at_s

    def wait(self, text: str, node: str | None = None, timeout_s: float = 120.0) -> float:
        """Waits for the first line that contains `text` (of a node); returns when it came."""

        def found() -> list[float]:
            return [at for at, where, line in self.lines if text in line and node in (None, where)]

        self.nodes.wait_until(lambda: bool(found() or self._failed()), timeout_s)
        if not found():
            raise RuntimeError(f"{self._failed()} ended before {text!r}: {[line for _, _, line in self.lines[-40:]]}")
        return found()[0]

    def wait_for_step(self, step: int, generation: int) -> float:
        """Waits until rank 0 has reported a step in a generation."""

        def found() -> bool:
            return any(entry["step"] >= step and entry["generation"] >= generation for entry in self.steps)

        self.nodes.wait_until(lambda: bool(found() or self._failed()), 120)
        if not found():
            raise RuntimeError(f"{self._failed()} ended before: {[line for _, _, line in self.lines[-40:]]}")
        return time.monotonic()

    def wait_for_end(self, node: str, timeout_s: float = 120.0) -> int:
        """Waits until the rank of a node has ended; returns its exit code. It no longer counts as running."""
        number = self.running.pop(node)
        self.nodes.wait_until(lambda: self.nodes.children[node, number] is not None, timeout_s)
        code = self.nodes.children[node, number]
        assert code is not None
        return code

    def finish(self, timeout_s: float = 120.0) -> None:
        """Waits until all that run have ended well; ends the store."""
        for node in list(self.running):
            if (code := self.wait_for_end(node, timeout_s)) != 0:
                raise RuntimeError(f"{node} ended with {code}: {[line for _, _, line in self.lines[-40:]]}")
        self.nodes.kill(STORE_NODE, self._server, "TERM")
        self._last_line = len(self.nodes.lines)

    def losses(self) -> dict[int, float]:
        """Each step's loss; of one that was done again after a failure, the last."""
        return {entry["step"]: entry["loss"] for entry in self.steps}

    def generations(self) -> list[tuple[int, int, int]]:
        """(ranks, first step, last step) of each generation that did a step."""
        by_number: dict[int, list[dict[str, Any]]] = {}
        for entry in self.steps:
            by_number.setdefault(entry["generation"], []).append(entry)
        return [(e[0]["ranks"], e[0]["step"], e[-1]["step"]) for _, e in sorted(by_number.items())]

    def members(self) -> dict[int, list[str]]:
        """Generation -> its nodes, as the ranks said."""
        found = {}
        for _, _, line in self.lines:
            if match := re.match(r"generation (\d+): (rank .*); agreed", line):
                found[int(match[1])] = re.findall(r" on ([a-z0-9]+)", match[2])
        return found

    def kept(self) -> dict[str, tuple[str, str]]:
        """Node -> what is open in its first and its last generation of all nodes, of processes that lived on.

        Where the fewest are, of the last steps: what a step or an error has open for a moment does not count. What a
        generation leaves open would be in the last, but not in the first.
        """
        found: dict[tuple[str, str], dict[int, list[tuple[int, str]]]] = {}
        members = self.members()
        for _, node, line in self.lines:
            match = re.match(r"(\d+) descriptors of process (\d+) in generation (\d+): (.*)$", line)
            if match and len(members[int(match[3])]) == len(self.places):
                steps = found.setdefault((node, match[2]), {}).setdefault(int(match[3]), [])
                steps.append((int(match[1]), match[4]))
        lived = {node: list(steps.values()) for (node, _), steps in found.items() if len(steps) > 1}
        return {
            node: (min(steps[0][-LAST_STEPS:])[1], min(steps[-1][-LAST_STEPS:])[1]) for node, steps in lived.items()
        }

    def _failed(self) -> list[str]:
        """Nodes whose rank ended badly though nobody killed it."""
        return [node for node, number in self.running.items() if self.nodes.children[node, number]]
