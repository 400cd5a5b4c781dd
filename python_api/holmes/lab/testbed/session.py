"""A running testbed, seen from outside: starts processes on its nodes and changes its links while they run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from holmes.lab.testbed import fabric, sysfs
from holmes.lab.testbed.changes import LIMITS, changed
from holmes.lab.testbed.requirements import explain_refusal, find_line_program, find_tools
from holmes.lab.testbed.spec import Spec, TestbedError
from holmes.lab.testbed.uml import Guest

_START_S = 20.0  # namespaces come up in milliseconds; a machine under load may need longer
_BOOT_S = 60.0  # kernels, all at once
_STOP_S = 5.0
_LAST_LINES = 5  # of what a program said, in an error about its end


class Process:
    """A process on a node. Thread safe.

    `lines` holds its output so far (stdout and stderr together); `pid` is its number inside the testbed.
    """

    def __init__(
        self,
        session: Session,
        number: int,
        argv: Sequence[str],
        on_line: Callable[[str], None] | None,
        guest: Guest | None = None,
    ):
        self.argv = list(argv)
        self.lines: list[str] = []
        self.pid: int | None = None
        self.returncode: int | None = None
        self.ended_s: float | None = None
        self._session = session
        self._number = number
        self._on_line = on_line
        self._guest = guest

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for the end; returns the exit code, or minus the signal that ended it.

        A program that cannot start ends with 126 or 127, as in a shell. Raises TimeoutError after `timeout_s`,
        TestbedError where the testbed ended first.
        """
        if not self._session.wait_until(lambda: self.returncode is not None, timeout_s):
            raise TimeoutError(f"{self.argv[0]} still runs after {timeout_s} s")
        assert self.returncode is not None
        return self.returncode

    def wait_for_line(self, text: str, timeout_s: float) -> str:
        """Waits for the first output line that contains `text` and returns it.

        Raises TimeoutError after `timeout_s`, TestbedError where the process ended without such a line.
        """

        def found() -> str | None:
            return next((line for line in self.lines if text in line), None)

        if not self._session.wait_until(lambda: found() is not None or self.returncode is not None, timeout_s):
            raise TimeoutError(f"{self.argv[0]} printed no line with {text!r} within {timeout_s} s")
        line = found()
        if line is None:
            said = "; ".join(self.lines[-_LAST_LINES:]) or "it said nothing"
            raise TestbedError(f"{self.argv[0]} ended with {self.returncode} before a line with {text!r}: {said}")
        return line

    def kill(self, signal_number: int = signal.SIGKILL, *, group: bool = False) -> None:
        """Sends a signal to the process, or to its whole process group; does nothing once it has ended."""
        self._session.request(self._guest, op="signal", id=self._number, signal=int(signal_number), group=group)


class Session:
    """The namespaces of one testbed, alive between enter and exit. Thread safe.

    Leaving the context ends every process in it and with them all namespaces and links; so does the end of this
    process, however it comes.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._condition = threading.Condition()
        self._write_lock = threading.Lock()
        self._numbers = itertools.count()
        self._processes: dict[int, Process] = {}
        self._ready = False
        self._failure: BaseException | None = None
        self._errors: deque[str] = deque(maxlen=20)
        self._tools: dict[str, str] = {}
        self._agent: subprocess.Popen[bytes] | None = None
        self._readers: list[threading.Thread] = []
        self._line: Process | None = None
        self._guests: dict[str, Guest] = {}
        self._kernels: list[Process] = []
        self._stack = contextlib.ExitStack()
        self._links = fabric.links(spec)
        self._link_lock = threading.Lock()

    def __enter__(self) -> Session:
        """Builds the testbed. Raises TestbedError with what to do where a tool is missing or the kernel refuses."""
        self._tools = find_tools()
        agent = Path(__file__).with_name("agent.py")
        self._agent = subprocess.Popen(
            [self._tools["unshare"], "-Urnmp", "--fork", "--kill-child", sys.executable, "-IS", str(agent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PATH": self._path()},
            start_new_session=True,  # a Ctrl-C at the terminal reaches this process only, which then ends the rest
        )
        try:
            self._readers = [threading.Thread(target=t, daemon=True) for t in (self._read_events, self._read_errors)]
            for reader in reversed(self._readers):
                reader.start()
            try:
                ready = self.wait_until(lambda: self._ready, _START_S)
            except TestbedError:
                ready = False
            if not ready:
                self.close()
                raise TestbedError(explain_refusal("; ".join(self._errors)))
            for step in fabric.build(self.spec):
                self._run(step)
            self._run(sysfs.write_all(self.spec))
            self._start_lines()
            if self.spec.kernel == "uml":
                self._boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends everything."""
        self.close()

    def close(self) -> None:
        """Ends every process of the testbed and waits until they are gone. May be called again."""
        agent = self._agent
        if agent is None:
            return
        with contextlib.suppress(BrokenPipeError):
            agent.stdin.close()  # type: ignore[union-attr]
        try:
            agent.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            agent.kill()  # --kill-child takes process 1 with it
            agent.wait()
        for reader in self._readers:
            reader.join(_STOP_S)
        self._stack.close()

    def spawn(
        self,
        node: str | None,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        cwd: str | Path | None = None,
        stdin: str = "",
        on_line: Callable[[str], None] | None = None,
    ) -> Process:
        """Starts a program on a node (None: in the namespace of the bridges) and returns at once.

        `env` is added to this process's environment. `on_line` is called for every output line, on the reader's
        thread; an exception it raises is raised again by the next wait.
        """
        names: Mapping[str, str] = {}
        working_dir = str(cwd or Path.cwd())
        guest = None if node is None else self._guests.get(node)
        command = list(argv)
        if guest is not None:
            names = guest.environment()
        elif node is not None:
            names = fabric.node_env(self.spec.node(node))
            command = fabric.enter_node(node, working_dir, argv)
        full_env = {**os.environ, "PATH": self._path(), **names, **(env or {})}
        return self._spawn(guest, command, argv, full_env, working_dir, stdin, on_line)

    def _spawn(
        self,
        guest: Guest | None,
        command: list[str],
        shown: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        stdin: str,
        on_line: Callable[[str], None] | None,
    ) -> Process:
        process = Process(self, next(self._numbers), shown, on_line, guest)
        with self._condition:
            self._processes[process._number] = process
        self.request(guest, op="spawn", id=process._number, argv=command, env=env, cwd=cwd, stdin=stdin)
        return process

    def exec(self, node: str | None, argv: Sequence[str], *, stdin: str = "", timeout_s: float = 30.0) -> str:
        """Runs a program to its end and returns its output. Raises TestbedError where it fails."""
        process = self.spawn(node, argv, stdin=stdin)
        returncode = process.wait(timeout_s)
        output = "\n".join(process.lines)
        if returncode != 0:
            place = f" on node {node}" if node else ""
            raise TestbedError(f"`{' '.join(argv)}`{place} ended with {returncode}: {output.strip() or 'no output'}")
        return output

    def set_link(self, node: str, nic: str, *, up: bool) -> None:
        """Takes a NIC of a node down, or up again; its address stays and its routes come back."""
        self.spec.node(node).nic(nic)
        self.exec(node, ["ip", "link", "set", "dev", nic, "up" if up else "down"])

    def set_rate(self, node: str, nic: str, rate_gbps: float) -> None:
        """Changes the rate of a NIC's link, in each direction; the node's sysfs keeps showing the old one."""
        for step in fabric.set_rate(self.spec, node, nic, rate_gbps):
            self._run(step)

    def change_link(self, name: str, **values: Any) -> None:
        """Changes a link while it is used.

        `name` is NODE.NIC, or NETWORK/CLUSTER for a cluster's uplink; `values` are a link's keys as in a spec, and
        `up`. Raises SpecError, see `changes.changed`.
        """
        with self._link_lock:
            after = changed(self.spec, self._links, name, values)
            self._links[name] = after
            if not LIMITS.isdisjoint(values):
                for step in fabric.set_limits(self.spec, name, after):
                    self._run(step)
            lanes = [replace(lane, link=self._links[lane.name]) for lane in fabric.lanes(self.spec)]
            if any(lane.name == name for lane in lanes):
                self._change_lines(lanes)
            if "up" in values:
                self._run(fabric.set_up(self.spec, name, values["up"]))

    def line_counters(self) -> list[dict[str, Any]]:
        """What became of the packets of each link with delay or loss so far, as `holmes-line` says it."""
        if self._line is None:
            return []
        with self._link_lock:
            return [json.loads(line) for line in self._ask_lines(signal.SIGUSR1, "printed") if line != "printed"]

    def fail(self, error: BaseException) -> None:
        """Makes whoever waits raise this; what came first counts."""
        with self._condition:
            self._failure = self._failure or error
            self._condition.notify_all()

    def request(self, guest: Guest | None = None, /, **fields: Any) -> None:
        """Sends one request to the testbed's first process, or a node's. Raises TestbedError where it has ended."""
        if guest is not None:
            with self._write_lock:
                guest.send(fields)
            return
        assert self._agent is not None, "enter the session first"
        assert self._agent.stdin is not None
        try:
            with self._write_lock:
                self._agent.stdin.write(json.dumps(fields).encode() + b"\n")
                self._agent.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._failure or TestbedError("the testbed has ended") from error

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits until `condition` holds, checked at every event; returns False after `timeout_s`.

        Raises TestbedError where the testbed ended first, and what an `on_line` callback raised.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._condition:
            while not condition():
                if self._failure is not None:
                    raise self._failure
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                self._condition.wait(left_s)
        return True

    def _start_lines(self) -> None:
        """Starts what delays and loses packets, where the spec has such links; it ends with the testbed."""
        lanes = fabric.lanes(self.spec)
        if not lanes:
            return
        self._run(fabric.write_lanes(self.spec, lanes))
        self._line = self.spawn(None, [find_line_program(), str(fabric.LANES_FILE)])
        self._line.wait_for_line("ready", _START_S)

    def _boot(self) -> None:
        """Starts each node's kernel and waits until all can run programs; they end with the testbed."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="holmes-testbed-")))
        guests = [Guest(self.spec, node, folder, self._handle) for node in self.spec.nodes]
        for guest in guests:
            self._stack.callback(guest.close)
            command = guest.command()
            kernel = self._spawn(None, command, ["linux"], {"PATH": self._path()}, "/", "", guest.heard)
            self._kernels.append(kernel)

        def ended() -> bool:
            return any(kernel.returncode is not None for kernel in self._kernels)

        is_up = self.wait_until(lambda: ended() or all(guest.is_ready for guest in guests), _BOOT_S)
        if not is_up or ended():
            late = next(guest for guest in guests if not guest.is_ready or ended())
            why = "ended" if ended() else f"did not start within {_BOOT_S:g} s"
            raise TestbedError(f"the kernel of node {late.node.name} {why}: {late.last_words() or 'it said nothing'}")
        self._guests = {guest.node.name: guest for guest in guests}

    def _change_lines(self, lanes: list[fabric.Lane]) -> None:
        self._run(fabric.write_lanes(self.spec, lanes))
        self._ask_lines(signal.SIGHUP, "set")

    def _ask_lines(self, signal_number: int, answer: str) -> list[str]:
        """Sends `holmes-line` a signal and returns what it says to that, up to `answer`."""
        line = self._line
        assert line is not None, "it runs where there are lanes"
        before = len(line.lines)
        line.kill(signal_number)
        if not self.wait_until(lambda: answer in line.lines[before:], _START_S):
            raise TestbedError(f"the links do not answer within {_START_S:g} s")
        return line.lines[before:]

    def _run(self, step: fabric.Step) -> None:
        process = self.spawn(None, step.argv, stdin=step.stdin)
        if process.wait(_START_S) != 0:
            raise TestbedError(f"cannot {step.purpose}: {'; '.join(process.lines) or 'no reason given'}")

    def _path(self) -> str:
        # A user's PATH often lacks /usr/sbin, where ip and tc live.
        folders = [*os.environ.get("PATH", os.defpath).split(os.pathsep)]
        folders += [str(Path(tool).parent) for tool in self._tools.values()]
        return os.pathsep.join(dict.fromkeys(folders))

    def _read_events(self) -> None:
        assert self._agent is not None
        assert self._agent.stdout is not None
        failure: BaseException | None = None
        try:
            for line in self._agent.stdout:
                self._handle(json.loads(line))
        except BaseException as error:  # from an on_line callback: handed to the waiter
            failure = error
        if failure is None:
            self._readers[1].join(_STOP_S)  # it has what the testbed's first process said at its end
            failure = TestbedError(f"the testbed has ended: {'; '.join(self._errors) or 'it was closed'}")
        with self._condition:
            self._failure = failure
            self._condition.notify_all()
        for _ in self._agent.stdout:  # keep the testbed from blocking until it is closed
            pass

    def _handle(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        process = self._processes.get(event.get("id", -1))
        if kind == "line" and process is not None and process._on_line is not None:
            process._on_line(event["text"])
        with self._condition:
            if kind == "ready":
                self._ready = True  # of the testbed's first process, which comes before its nodes' own
            elif process is not None:
                if kind == "started":
                    process.pid = event["pid"]
                elif kind == "line":
                    process.lines.append(event["text"])
                elif kind == "exit":
                    process.returncode, process.ended_s = event["returncode"], time.monotonic()
                    del self._processes[process._number]
                    if process is self._line:
                        self._failure = TestbedError(f"the links have ended: {_end_of_lines(process)}")
                    if process in self._kernels and self._guests:
                        node = self.spec.nodes[self._kernels.index(process)].name
                        self._failure = TestbedError(
                            f"the kernel of node {node} has ended: {self._guests[node].last_words()}"
                        )
            self._condition.notify_all()

    def _read_errors(self) -> None:
        assert self._agent is not None
        assert self._agent.stderr is not None
        for line in self._agent.stderr:
            self._errors.append(line.decode(errors="replace").strip())


def _end_of_lines(process: Process) -> str:
    """How `holmes-line` ended, and what it said of that."""
    code = process.returncode or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    said = [line for line in process.lines if line.startswith("holmes-line:")]
    return ": ".join([f"holmes-line {how}", *said])
