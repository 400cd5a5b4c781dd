"""Hosts with real RDMA on a machine that has none: user-mode Linux with Soft-RoCE (docs/rdma.md).

A host is a kernel that runs as an ordinary process and sees this machine's files. `python tests/rdma/rig.py COMMAND`
runs a shell command on one host with two devices (rxe0 10.0.0.1, rxe1 10.0.0.2), `--hosts 2` on two with one each.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from holmes.lab.testbed import uml
from holmes.lab.testbed.uml import Missing

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[1]
WORK = TREE / "build" / "rdma"
#: Packages of perftest and of what it needs.
PERFTEST = ["perftest", "libibumad3", "libpci3", "librdmacm1"]


@dataclass(frozen=True)
class Result:
    """How a host's command ended; `status` is None where the host did not come to its end in time."""

    status: int | None
    output: str


def kernel() -> Path:
    """The built kernel: HOLMES_UML_KERNEL, else shared/lab/linux.rdma.xz beside the tree. Raises Missing."""
    os.environ.setdefault("HOLMES_UML_KERNEL", str(TREE.parent / "shared" / "lab" / "linux.rdma.xz"))
    return uml.kernel(WORK)


def verbs_root() -> Path:
    """As a testbed's nodes have it. Raises Missing."""
    return uml.verbs_root(WORK)


def perftest_root() -> Path:
    """The same with perftest, a folder of its own. Raises Missing."""
    root = uml.verbs_root(WORK / "perftest", PERFTEST)
    if not (root / "usr/bin/ib_write_lat").exists():
        raise Missing(f"no {root}/usr/bin/ib_write_lat: unpack {', '.join(PERFTEST)} there (dpkg -x, needs no root)")
    return root


def run(commands: list[str], timeout_s: float = 120) -> list[Result]:
    """Runs each shell command on a host of its own; they are joined where there are several (at most two).

    A single host has the devices rxe0 and rxe1 (10.0.0.1 and .2, interfaces va and vb), two have rxe0 each (10.0.0.1,
    10.0.0.2, interface vec0). Boots in a second or two. Raises Missing.
    """
    program, root, environment = kernel(), verbs_root(), uml.kernel_environment(WORK)
    lines: list[socket.socket] = []
    if len(commands) == 2:
        lines = list(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        for line in lines:
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                line.setsockopt(socket.SOL_SOCKET, buffer, 4 << 20)
    processes, folders = [], []
    with contextlib.ExitStack() as stack:
        for line in lines:
            stack.enter_context(line)
        for number, command in enumerate(commands):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holmes-rig-")))
            folders.append(folder)
            (folder / "command.sh").write_text(command + "\n")
            # It ends with this process, however that ends.
            arguments = [
                "setpriv",
                "--pdeathsig",
                "TERM",
                program,
                "mem=1G",
                "root=/dev/root",
                "rootfstype=hostfs",
                "rootflags=/",
                "ro",
                "quiet",
            ]
            arguments += ["con=null", "con0=null,fd:1", f"init={HERE / 'guest.sh'}", f"RIG={folder}"]
            arguments += [f"RIG_ROOT={root}", f"RIG_PYTHON={sys.executable}"]
            arguments += [f"RIG_HOST={number + 1 if lines else 0}"]
            if lines:
                arguments.append(
                    f"vec0:transport=fd,fd={lines[number].fileno()},mac=02:00:00:00:00:0{number + 1},depth=128,mtu=4200"
                )
            memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(folder)
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=(folder / "console").open("wb"),
                stderr=subprocess.STDOUT,
                pass_fds=[line.fileno() for line in lines[number : number + 1]],
                env={"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": memory, **environment},
                start_new_session=True,
            )
            processes.append(process)
            stack.callback(end, process)
        deadline = time.monotonic() + timeout_s
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
        return [result_in(folder) for folder in folders]


def result_in(folder: Path) -> Result:
    """What a host left in its folder."""
    status, output = folder / "status", folder / "output"
    text = output.read_text(errors="replace") if output.exists() else ""
    if not status.exists():
        return Result(None, text + "\nthe host's console: " + (folder / "console").read_text(errors="replace")[-2000:])
    return Result(int(status.read_text()), text)


def end(process: subprocess.Popen[bytes]) -> None:
    """A kernel is a group of processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait(10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("command", help="for every host; $RIG_HOST is its number (1, 2; 0 where it is alone)")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1)
    parser.add_argument("--timeout-s", type=float, default=120)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left behind
    try:
        results = run([asked.command] * asked.hosts, asked.timeout_s)
    except Missing as missing:
        print(missing, file=sys.stderr)
        return 77
    for number, result in enumerate(results, 1):
        print(f"--- host {number}: {'no end in time' if result.status is None else f'status {result.status}'}")
        print(result.output, end="")
    return max(1 if result.status is None else result.status for result in results)


if __name__ == "__main__":
    sys.exit(main())
