"""First process of the testbed, inside its namespaces: runs processes for the parent and reports their output.

Standard library only and run by path, in isolated mode: what the parent may import says nothing about this process.
Its argument, if any, is the file that is to stand for /proc/cpuinfo.
Speaks JSON lines on stdin and stdout.

    requests   {"op": "spawn", "id": 3, "argv": [...], "env": {...}, "cwd": "/", "stdin": "text"}
               {"op": "signal", "id": 3, "signal": 9, "group": false}
    events     {"event": "ready"}  {"event": "started", "id": 3, "pid": 17}  {"event": "line", "id": 3, "text": "..."}
               {"event": "exit", "id": 3, "returncode": -9}

It is process 1 of its PID namespace: when it ends (its stdin closed, or a signal), the kernel ends all others.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from typing import IO, Any

READ_BYTES = 65536
MAX_LINE_BYTES = 1 << 20  # a longer line is reported in pieces


class Child:
    """One process started for the parent: its output so far and its number in the protocol."""

    def __init__(self, number: int, process: "subprocess.Popen[bytes]", output: IO[bytes]) -> None:
        self.number = number
        self.process = process
        self.output = output
        self.partial = b""


class Agent:
    """The event loop. One thread; every read is non-blocking, every write to the parent blocks until it is taken."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.running: dict[int, Child] = {}  # by pid
        self.by_number: dict[int, Child] = {}
        self.requests = b""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.selector.register(wake_read, selectors.EVENT_READ, None)
        self.selector.register(0, selectors.EVENT_READ, None)
        self.wake_read = wake_read

    def emit(self, event: str, **fields: Any) -> None:
        """Sends one event."""
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()

    def run(self) -> None:
        """Serves until stdin closes."""
        self.emit("ready")
        while True:
            for key, _ in self.selector.select():
                if key.fd == 0:
                    data = os.read(0, READ_BYTES)
                    if not data:
                        return
                    *lines, self.requests = (self.requests + data).split(b"\n")
                    for line in lines:
                        self.serve(json.loads(line))
                elif key.fd == self.wake_read:
                    os.read(self.wake_read, READ_BYTES)
                    self.reap()
                elif not key.data.output.closed:  # by reap(), earlier in this round
                    self.read_output(key.data)

    def serve(self, request: dict[str, Any]) -> None:
        """Carries out one request."""
        if request["op"] == "spawn":
            try:
                self.spawn(request)
            except OSError as error:
                self.emit("line", id=request["id"], text=f"cannot start {request['argv'][0]}: {error}")
                self.emit("exit", id=request["id"], returncode=127)
        elif (child := self.by_number.get(request["id"])) is not None and child.process.pid in self.running:
            send = os.killpg if request["group"] else os.kill
            with contextlib.suppress(ProcessLookupError):
                send(child.process.pid, request["signal"])

    def spawn(self, request: dict[str, Any]) -> None:
        """Starts one process, leader of its own process group, with stdout and stderr in one pipe."""
        with tempfile.TemporaryFile(dir="/run") as stdin:
            stdin.write(request["stdin"].encode())
            stdin.seek(0)
            process = subprocess.Popen(
                request["argv"],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=request["env"],
                cwd=request["cwd"],
                start_new_session=True,
            )
        output = process.stdout
        assert output is not None
        os.set_blocking(output.fileno(), False)
        child = Child(request["id"], process, output)
        self.running[process.pid] = child
        self.by_number[child.number] = child
        self.selector.register(output, selectors.EVENT_READ, child)
        self.emit("started", id=child.number, pid=process.pid)

    def read_output(self, child: Child) -> bool:
        """Reports what the child wrote; returns whether there may be more now."""
        try:
            data = os.read(child.output.fileno(), READ_BYTES)
        except BlockingIOError:
            return False
        *lines, child.partial = (child.partial + data).split(b"\n")
        if child.partial and (not data or len(child.partial) > MAX_LINE_BYTES):
            lines, child.partial = [*lines, child.partial], b""
        for line in lines:
            # After a carriage return a terminal shows only the last part (progress bars).
            text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
            self.emit("line", id=child.number, text=text)
        if not data:
            self.selector.unregister(child.output)
            child.output.close()
        return bool(data)

    def reap(self) -> None:
        """Collects all ended processes, adopted orphans included, and reports those the parent asked for."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self.running.pop(pid, None)
            if child is not None:
                del self.by_number[child.number]
                child.process.returncode = os.waitstatus_to_exitcode(status)
                while not child.output.closed and self.read_output(child):
                    pass
                self.emit("exit", id=child.number, returncode=child.process.returncode)


def main() -> None:
    """Makes the namespaces' own /run and /proc, then serves."""
    os.umask(0o022)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"], check=True)
    # Refused in a container that masks parts of /proc; the old /proc still serves, with outer process numbers.
    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], stderr=subprocess.DEVNULL, check=False)
    for cpuinfo in sys.argv[1:]:
        subprocess.run(["mount", "--bind", cpuinfo, "/proc/cpuinfo"], check=True)
    Agent().run()


if __name__ == "__main__":
    main()
