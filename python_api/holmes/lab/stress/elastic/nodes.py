"""An elastic job on emulated nodes: a rank on each, its store on a node of its own, any paths between them cut."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

import holmes.lab.testbed
from holmes.lab.stress.elastic.settings import JobSettings
from holmes.lab.testbed import Process, Spec, TestbedSession, load_spec
from holmes.lab.testbed.launch import rank_environment
from holmes.lab.testbed.spec import parse_spec

STORE_NODE = "head"
_PORT = 29400
_NOWHERE = "02:00:00:00:00:99"  # a MAC address that nobody has: frames to it vanish
_LAST_LINES = 40
_KEPT_EVENTS = 4000  # of all ranks: a partition and what came before it


def spec_with_store(name: str = "two-clusters") -> Spec:
    """A built-in testbed with one more node, on the network that all share, which serves the store."""
    path = Path(holmes.lab.testbed.__file__).with_name("specs") / f"{name}.yaml"
    data: dict[str, Any] = yaml.safe_load(path.read_text())
    common = load_spec(name).common_network
    data["clusters"][STORE_NODE] = {"nodes": {STORE_NODE: {}}, "nics": [{"name": "eth0", "network": common}]}
    return parse_spec(f"{name}-with-{STORE_NODE}", data)


class Network:
    """What nodes of a session reach of each other. Frames of a cut path vanish; every NIC stays up."""

    def __init__(self, session: TestbedSession) -> None:
        self._session = session
        self._cut: dict[str, list[tuple[str, str]]] = {}  # node -> (address, device) that it does not reach

    def cut(self, pairs: Collection[tuple[str, str]]) -> None:
        """From now on these nodes do not reach each other, over any network."""
        for one, other in pairs:
            for near, far in ((one, other), (other, one)):
                for nic in self._session.spec.node(near).nics:
                    end = self._session.spec.node(far).nic_on(nic.network)
                    if end is not None:
                        self._cut.setdefault(near, []).append((str(end.address.ip), nic.name))
        self._on_all("neigh replace {} lladdr " + _NOWHERE + " nud permanent dev {}")

    def heal(self) -> None:
        """All reach all again."""
        self._on_all("neigh del {} dev {}")
        self._cut.clear()

    def _on_all(self, line: str) -> None:
        """At once, as far as one machine can."""
        processes = [
            self._session.spawn(node, ["ip", "-batch", "-"], stdin="".join(line.format(*end) + "\n" for end in ends))
            for node, ends in self._cut.items()
        ]
        for process in processes:
            if process.wait(30) != 0:
                raise holmes.lab.testbed.TestbedError(f"ip ended badly: {' / '.join(process.lines)}")


class NodeRank:
    """One process in a rank's place. `last`: its last lines of the log; `error`: the one it ended with, if it said."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        self.error = ""
        self.process: Process | None = None

    @property
    def has_ended(self) -> bool:
        """Whether its process is gone."""
        return self.process is not None and self.process.returncode is not None


class NodeJob:
    """The job: `ranks` by node; `began`: how often a rank was started. Leave it to end all.

    `on_step`: gets each step that a rank tells, with its node, on the reader's thread. `steps`: the last ones.
    """

    def __init__(
        self,
        session: TestbedSession,
        folder: Path,
        settings: JobSettings,
        on_step: Callable[[dict[str, Any]], None] = lambda step: None,
    ) -> None:
        self.session, self._folder, self.settings, self._on_step = session, folder, settings, on_step
        self.nodes = [node.name for node in session.spec.nodes if node.name != STORE_NODE]
        self.ranks: dict[str, NodeRank] = {}
        self.steps: deque[dict[str, Any]] = deque(maxlen=_KEPT_EVENTS)
        self.ended: list[NodeRank] = []
        self._lock = threading.Lock()
        nic = session.spec.node(STORE_NODE).nics[0]
        self._store = f"{nic.address.ip}:{_PORT}"
        command = [sys.executable, "-m", "holmes", "store", "--listen", str(nic.address.ip), "--port", str(_PORT)]
        self._server = session.spawn(STORE_NODE, command)
        for node in self.nodes:
            self.start(node)

    def __enter__(self) -> NodeJob:
        """For its end."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends what is left, and the store."""
        running = [rank.process for rank in self.ranks.values()]
        for process in (*running, self._server):
            if process is not None and process.returncode is None:
                process.kill(group=True)
                process.wait(10)

    def start(self, node: str) -> None:
        """A process in this node's place; after an earlier one has ended, as a launcher does."""
        rank = self.ranks[node] = NodeRank(node)
        places = [(name, 0) for name in self.nodes]
        env = {
            **rank_environment(self.session.spec, places, self.nodes.index(node)),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        worker = [sys.executable, "-m", "holmes.lab.stress.elastic.worker", str(self._folder), self._store]
        rank.process = self.session.spawn(
            node, [*worker, self.settings.to_json()], env, on_line=lambda line: self._hear(rank, line)
        )

    def start_again(self) -> None:
        """Whoever has ended, as a launcher does."""
        for node, rank in list(self.ranks.items()):
            if rank.has_ended:
                self.ended.append(rank)
                self.start(node)

    def steps_since(self, began_s: float) -> list[dict[str, Any]]:
        """Those that began then (time.monotonic) or later."""
        with self._lock:
            return [step for step in self.steps if step["began_s"] >= began_s]

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, *, restarts: bool = True) -> bool:
        """Whether it came true in time; whoever ends meanwhile is started again, unless told otherwise."""
        end_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end_s:
                return False
            if restarts:
                self.start_again()
            time.sleep(0.05)
        return True

    def last_words(self) -> Mapping[str, str]:
        """By node."""
        return {node: " / ".join(list(rank.last)[-6:]) for node, rank in self.ranks.items()}

    def _hear(self, rank: NodeRank, line: str) -> None:
        if not line.startswith('{"event"'):
            rank.last.append(line)
        else:
            event = json.loads(line)
            if event["event"] == "step":
                event["node"] = rank.node
                with self._lock:
                    self.steps.append(event)
                self._on_step(event)
            elif event["event"] == "error":
                rank.error = event["error"]
                rank.last.append(f"{event['error']}: {event['message']}")
        if rank.process is not None:
            rank.process.lines.clear()  # it would hold all of a long run
