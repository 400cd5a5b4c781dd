"""Runs one command as many ranks over a testbed's nodes, as torchrun would, and collects what became of them."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holmes.lab.testbed.changes import Change
from holmes.lab.testbed.session import Process, Session
from holmes.lab.testbed.spec import Spec, TestbedError, load_spec
from holmes_comm.errors import UsageError

MASTER_PORT = 29500  # free in every node: their networks hold nothing but this job
TIMEOUT_EXIT_CODE = 124  # as timeout(1)

#: Called with rank, node and line.
OnLine = Callable[[int, str, str], None]


@dataclass(frozen=True)
class RankFailure:
    """A rank that ended badly: `returncode` is its exit code, or minus the signal that ended it."""

    rank: int
    node: str
    returncode: int

    def __str__(self) -> str:
        """One line for people."""
        if self.returncode < 0:
            return f"rank {self.rank} on {self.node} was ended by {signal.Signals(-self.returncode).name}"
        return f"rank {self.rank} on {self.node} ended with exit code {self.returncode}"


@dataclass(frozen=True)
class TestbedResult:
    """What a job came to.

    returncode: 0; else the exit code of the rank that failed first (128 + signal where a signal ended it); 124 where
    time ran out first. failures: in the order in which they happened; ranks that were ended because of an earlier
    failure or the timeout are not among them. outputs: each rank's lines.
    """

    __test__ = False

    returncode: int
    failures: tuple[RankFailure, ...]
    outputs: Mapping[int, list[str]]
    duration_s: float
    timed_out: bool = False


class RunningJob:
    """The ranks of one command on a live session: `processes[r]` is rank r, on node `nodes[r]`."""

    def __init__(self, processes: Sequence[Process], nodes: Sequence[str], session: Session) -> None:
        self.processes = list(processes)
        self.nodes = list(nodes)
        self._session = session
        self._start_s = time.monotonic()

    def wait(self, timeout_s: float | None = None, *, grace_s: float = 10.0) -> TestbedResult:
        """Waits for all ranks. Once one has failed, the others have `grace_s` to end by themselves, then are killed.

        After `timeout_s`, and on Ctrl-C, every rank is killed too. Raises TestbedError where the testbed ended first.
        """
        try:
            return self._wait(timeout_s, grace_s)
        except (KeyboardInterrupt, SystemExit):
            self.stop()
            raise

    def _wait(self, timeout_s: float | None, grace_s: float) -> TestbedResult:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s

        def left_s() -> float | None:
            return None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)

        def ended() -> bool:
            return all(process.returncode is not None for process in self.processes)

        def settled() -> bool:
            return ended() or any(process.returncode for process in self.processes)

        timed_out = not self._session.wait_until(settled, left_s())
        if not timed_out and not ended():
            budget_s = left_s()
            self._session.wait_until(ended, grace_s if budget_s is None else min(grace_s, budget_s))
        failed = [
            (process.ended_s or 0.0, RankFailure(rank, self.nodes[rank], process.returncode))
            for rank, process in enumerate(self.processes)
            if process.returncode
        ]
        failures = tuple(failure for _, failure in sorted(failed, key=lambda item: item[0]))
        self.stop()
        if failures:
            code = failures[0].returncode
            returncode = 128 - code if code < 0 else code
        else:
            returncode = TIMEOUT_EXIT_CODE if timed_out else 0
        return TestbedResult(
            returncode=returncode,
            failures=failures,
            outputs={rank: list(process.lines) for rank, process in enumerate(self.processes)},
            duration_s=time.monotonic() - self._start_s,
            timed_out=timed_out,
        )

    def stop(self, grace_s: float = 2.0) -> None:
        """Ends ranks that still run, with all they started: SIGTERM, and SIGKILL after `grace_s`."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            running = [process for process in self.processes if process.returncode is None]
            for process in running:
                process.kill(signal_number, group=True)
            self._session.wait_until(lambda: all(p.returncode is not None for p in self.processes), grace_s)


class Testbed:
    """N emulated nodes in C clusters, described by a Spec, a built-in spec's name or a YAML file.

    Raises SpecError where the spec is wrong. Nothing runs until `run` or `session`.
    """

    __test__ = False

    def __init__(self, spec: Spec | str | Path) -> None:
        self.spec = spec if isinstance(spec, Spec) else load_spec(spec)

    def session(self) -> TestbedSession:
        """Returns a context manager that builds the testbed and keeps it, to start jobs on it and to break it."""
        return TestbedSession(self.spec)

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        nproc_per_node: int = 1,
        on_line: OnLine | None = None,
        timeout_s: float | None = None,
        grace_s: float = 10.0,
        shuffle_seed: int | None = None,
        changes: Sequence[Change] = (),
        on_change: Callable[[Change], None] | None = None,
    ) -> TestbedResult:
        """Builds the testbed, runs `command` on every node `nproc_per_node` times, and takes everything down again.

        `changes` of links happen meanwhile, in their order; `on_change` is called with each, on another thread. See
        TestbedSession.launch and RunningJob.wait for the other arguments.
        """
        with self.session() as session:
            job = session.launch(
                command, env=env, nproc_per_node=nproc_per_node, on_line=on_line, shuffle_seed=shuffle_seed
            )
            with session.changing(changes, on_change):
                return job.wait(timeout_s, grace_s=grace_s)


class TestbedSession(Session):
    """A Session that can launch jobs."""

    __test__ = False

    @contextmanager
    def changing(self, changes: Sequence[Change], on_change: Callable[[Change], None] | None = None) -> Iterator[None]:
        """Changes links at their times from now on, until the context is left.

        Where one fails, whoever waits for a process raises that.
        """
        ended = threading.Event()
        start_s = time.monotonic()

        def change_all() -> None:
            try:
                for change in changes:
                    if ended.wait(start_s + change.at_s - time.monotonic()):
                        return
                    self.change_link(change.link, **change.values)
                    if on_change is not None:
                        on_change(change)
            except Exception as error:  # for the waiter
                self.fail(error)

        thread = threading.Thread(target=change_all, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def __enter__(self) -> TestbedSession:
        """Builds the testbed, see Session."""
        super().__enter__()
        return self

    def launch(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        nproc_per_node: int = 1,
        on_line: OnLine | None = None,
        shuffle_seed: int | None = None,
        cwd: str | Path | None = None,
        name_clusters: bool = False,
    ) -> RunningJob:
        """Starts `command` as one job and returns at once.

        Ranks fill node after node; with `shuffle_seed` they lie in a random order over all places. Each rank gets
        torchrun's variables, HOLMES_TESTBED=1, HOLMES_HOSTNAME, HOLMES_SYSFS_ROOT, GLOO_SOCKET_IFNAME (the node's
        interface on the network that all share), and unless this process sets them OMP_NUM_THREADS=1 and
        PYTHONUNBUFFERED=1; with `name_clusters` HOLMES_CLUSTER, its node's; then `env`.
        `on_line` is called with rank, node and line, on another thread. Raises ValueError on a wrong argument.
        """
        if not command:
            raise UsageError("the command is empty; give a program and its arguments")
        places = place_ranks(self.spec, nproc_per_node, shuffle_seed)
        processes = []
        for rank, (node, _) in enumerate(places):
            callback = None if on_line is None else _with_rank(on_line, rank, node)
            rank_env = {**_default_env(), **rank_environment(self.spec, places, rank, name_clusters), **(env or {})}
            processes.append(self.spawn(node, command, rank_env, cwd=cwd, on_line=callback))
        return RunningJob(processes, [node for node, _ in places], self)


def place_ranks(spec: Spec, nproc_per_node: int, shuffle_seed: int | None = None) -> list[tuple[str, int]]:
    """Returns each rank's node and local rank. On a node, local ranks follow the order of global ones."""
    if nproc_per_node < 1:
        raise UsageError(f"nproc_per_node is {nproc_per_node}; it must be 1 or more")
    nodes = [node.name for node in spec.nodes for _ in range(nproc_per_node)]
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(nodes)
    return [(node, nodes[:rank].count(node)) for rank, node in enumerate(nodes)]


def rank_environment(
    spec: Spec, places: Sequence[tuple[str, int]], rank: int, name_clusters: bool = False
) -> dict[str, str]:
    """Returns what a rank finds in its environment beside the node's own variables (see fabric.node_env)."""
    node, local_rank = places[rank]
    node_order = list(dict.fromkeys(name for name, _ in places))  # by their first rank
    master = spec.node(places[0][0]).nic_on(spec.common_network)
    common = spec.node(node).nic_on(spec.common_network)
    if master is None or common is None:
        raise TestbedError(f"network {spec.common_network} does not join node {node}")
    node_rank = str(node_order.index(node))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(len(places)),
        "LOCAL_WORLD_SIZE": str(sum(name == node for name, _ in places)),
        "NODE_RANK": node_rank,
        "GROUP_RANK": node_rank,
        "GROUP_WORLD_SIZE": str(len(node_order)),
        "MASTER_ADDR": str(master.address.ip),
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": common.name,
        **({"HOLMES_CLUSTER": spec.node(node).cluster} if name_clusters else {}),
    }


def _default_env() -> dict[str, str]:
    return {name: os.environ.get(name, "1") for name in ("OMP_NUM_THREADS", "PYTHONUNBUFFERED")}


def _with_rank(on_line: OnLine, rank: int, node: str) -> Callable[[str], None]:
    return lambda line: on_line(rank, node, line)
