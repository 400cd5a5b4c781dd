"""perftest as a peer: what ib_write_bw and ib_write_lat, an HCA's own benchmarks, say of the port that Holmes takes.

Rank 1 runs a server, rank 0 its client. Each tells the other through the store how its process ended.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

import holmes_comm
from holmes.cluster.probe import Exchange
from holmes.tools.bench.operations import Case
from holmes.tools.bench.peer import Context, PeerError, SelfTimedPeer
from holmes.tools.bench.timing import PARTS, SINGLE_CALLS, RoundTimes
from holmes_comm import _C
from holmes_comm.errors import HolmesError

_TOOLS = {"send": "ib_write_bw", "ping_pong": "ib_write_lat"}
_HOW_TO_GET = (
    "install the package perftest (apt install perftest, dnf install perftest), or build github.com/linux-rdma/perftest"
)
#: What Holmes's variables are called there. The timeout is always given: 18 is what Holmes has where none is set.
_OPTIONS = {
    "HOLMES_RDMA_TIMEOUT": "--qp-timeout",
    "HOLMES_RDMA_MTU": "--mtu",
    "HOLMES_RDMA_SERVICE_LEVEL": "--sl",
    "HOLMES_RDMA_TRAFFIC_CLASS": "--tclass",
    "HOLMES_RDMA_PKEY_INDEX": "--pkey_index",
}
# perftest measures the rate of the processor's counter at each start, and on a busy machine now and then has none.
_TRIES = 10
_POLL_S, _ASK_S = 0.02, 1.0
_TOLD_S = datetime.timedelta(seconds=0.1)
_LAST_WORDS = 400


class NoClockError(HolmesError):
    """The tool ran and told no times."""


class ToolError(HolmesError):
    """The tool failed; empty where the other rank says why."""


class _Tool(NamedTuple):
    """A running process and its files."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]

    def text(self) -> str:
        self.output.seek(0)
        return self.output.read().decode(errors="replace")

    def last_words(self) -> str:
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").strip() or self.text().strip()
        return " / ".join(line.strip() for line in said[-_LAST_WORDS:].splitlines() if line.strip(" -*"))


class PerftestPeer(SelfTimedPeer):
    """The port that Holmes uses between two ranks, or would for a selection of NICs, as perftest sees it."""

    least_calls, most_calls = 5, 10_000

    def __init__(self, nics: str | None) -> None:
        """`nics` is a selection as NicSelection.parse reads it, as of the Holmes beside it."""
        self.name = f"perftest[{nics}]" if nics else "perftest"
        self._nics = nics
        self._context: Any = None
        self._facts: dict[str, Any] = {}
        self._address = ""
        self._most_bytes = 0
        self._runs = 0

    @property
    def path(self) -> str:
        """Never another."""
        return "rdma"

    def setup(self, context: Context) -> None:
        """Asks a communicator of Holmes which port, GID and address it takes."""
        self._context = context
        if context.ranks != 2:
            return  # `unsupported` says so
        exchange = Exchange(context.store, context.rank, context.ranks, f"bench/{self.name}")
        missing = [tool for tool in _TOOLS.values() if shutil.which(tool) is None]
        for rank, names in enumerate(exchange.all_gather(missing)):
            if names:
                raise PeerError(f"{self.name}: rank {rank} has no {' and no '.join(names)} on PATH; {_HOW_TO_GET}")
        try:
            communicator = holmes_comm.init(
                context.store,
                context.rank,
                context.ranks,
                nics=holmes_comm.NicSelection.parse(self._nics) if self._nics else None,
                transport="rdma",
                timeout_s=context.timeout_s,
                name=f"bench-{self.name}",
            )
            connections = communicator.connections()
            name = next((each["interface"] for each in connections if each["transport"] == "rdma"), None)
            if name is None:
                raise PeerError(f"{self.name}: ranks of one host share memory and use no HCA; set HOLMES_SHM=0")
            port = _C.RdmaPort(name)
        except HolmesError as error:
            raise error if isinstance(error, PeerError) else PeerError(f"{self.name}: {error}") from error
        self._address = next(each["local_address"] for each in connections if each["purpose"] == "control")
        self._facts = {"version": _version(), "port": name, "gid_index": None}
        if port.fabric != "InfiniBand" or "HOLMES_RDMA_GID_INDEX" in os.environ:
            self._facts["gid_index"] = port.gid_index
        self._most_bytes = min(exchange.all_gather(port.max_message_bytes))

    def unsupported(self, case: Case) -> str | None:
        """Two operations, between two ranks, of messages that the HCA carries in one."""
        if case.operation.name not in _TOOLS:
            return f"it has {' and '.join(f'{name} ({tool})' for name, tool in _TOOLS.items())} only"
        if case.ranks != 2:
            return f"it is between 2 ranks, here are {case.ranks}"
        if case.size_bytes > self._most_bytes:
            return f"a message has {self._most_bytes} B at most there"
        return None

    def time_round(self, case: Case, calls: int) -> RoundTimes:
        """Runs the tool once for all calls."""
        for _ in range(_TRIES):
            told = self._run(case, max(calls, self.least_calls))
            if "parts_s" in told:
                return RoundTimes(np.array(told["parts_s"]), np.array(told["singles_s"]))
        raise PeerError(f"{self.name}: {told['no_clock']}, {_TRIES} times")

    def _run(self, case: Case, calls: int) -> dict[str, Any]:
        """Collective. What rank 0 has read in its tool's output. Raises PeerError on both ranks where one failed."""
        self._runs += 1
        rank, tool = self._context.rank, _TOOLS[case.operation.name]
        keys = [f"bench/{self.name}/runs/{self._runs}/{one}" for one in (*range(2), "server")]
        try:
            output = self._serve(tool, case, calls, keys) if rank == 1 else self._ask(tool, case, calls, keys)
            told = {} if rank == 1 else _times(case, calls, output)
        except NoClockError as error:
            told = {"no_clock": f"{tool} {error}"}
        except (ToolError, OSError) as error:
            told = {"failure": f"{tool} {error}" if str(error) else ""}
        self._context.store.set(keys[rank], json.dumps(told))
        theirs: dict[str, Any] = json.loads(self._get(keys[1 - rank], f"what became of rank {1 - rank}'s {tool}"))
        both = [theirs, told] if rank == 1 else [told, theirs]
        if any("failure" in each for each in both):
            texts = [f"rank {one}: {each['failure']}" for one, each in enumerate(both) if each.get("failure")]
            raise PeerError(f"{self.name}, {case.operation.name} of {case.size_bytes} B: {'; '.join(texts)}")
        return both[0]

    def _serve(self, tool: str, case: Case, calls: int, keys: Sequence[str]) -> str:
        """The server's output. The client is told where it is once it listens; nothing where it does not."""
        place = ""
        try:
            port = _free_port()
            with _started([*self._command(tool, case, calls), "--port", str(port)]) as server:
                self._await(server, keys[0], lambda: _listens(port))
                if server.process.poll() is not None:
                    self._output(server, keys[0])
                    raise ToolError("ended before it listened")
                host, _, _ = self._address.rpartition(":")
                if ":" in host:
                    raise ToolError(f"connects by IPv4 only, and the ranks do by {self._address}")
                place = f"{port} {host}"
                self._context.store.set(keys[2], place)
                return self._output(server, keys[0])
        finally:
            if not place:
                self._context.store.set(keys[2], place)

    def _ask(self, tool: str, case: Case, calls: int, keys: Sequence[str]) -> str:
        """The client's output."""
        place = self._get(keys[2], f"where rank 1's {tool} listens")
        if not place:
            raise ToolError("")
        port, host = place.split()
        with _started([*self._command(tool, case, calls), "--port", port, host]) as client:
            return self._output(client, keys[1])

    def _command(self, tool: str, case: Case, calls: int) -> list[str]:
        device, _, port = self._facts["port"].partition(":")
        words = [tool, "--ib-dev", device, "--ib-port", port, "--size", str(case.size_bytes), "--iters", str(calls)]
        if self._facts["gid_index"] is not None:
            words += ["--gid-index", str(self._facts["gid_index"])]
        given = {"HOLMES_RDMA_TIMEOUT": "18", **os.environ}
        for variable, option in _OPTIONS.items():
            words += [option, given[variable]] if variable in given else []
        # Every time of ib_write_lat, and no search for ib_write_bw's fastest pair; a processor that changes its rate
        # is only warned of.
        return [*words, "--report-unsorted" if tool == "ib_write_lat" else "--noPeak", "--CPU-freq"]

    def _output(self, tool: _Tool, other: str) -> str:
        """What it printed, once it has ended well."""
        self._await(tool, other, lambda: False)
        if tool.process.returncode != 0:
            raise ToolError(f"ended with status {tool.process.returncode}: {tool.last_words()}")
        return tool.text()

    def _await(self, tool: _Tool, other: str, is_there: Callable[[], bool]) -> None:
        """Until it has ended or something is there. Raises ToolError after the deadline, and where the other failed."""
        begin_s = asked_s = time.monotonic()
        while tool.process.poll() is None and not is_there():
            time.sleep(_POLL_S)
            now_s = time.monotonic()
            if now_s - begin_s > self._context.timeout_s:
                raise ToolError(f"did not end within {self._context.timeout_s:g} s: {tool.last_words()}")
            if now_s - asked_s > _ASK_S:
                if "failure" in self._told(other):
                    raise ToolError("")
                asked_s = time.monotonic()

    def _told(self, key: str) -> dict[str, Any]:
        """How the other rank's tool ended; empty while it has not."""
        try:
            self._context.store.wait([key], _TOLD_S)
            told: dict[str, Any] = json.loads(self._context.store.get(key))
        except Exception:  # each store raises its own
            return {}
        return told

    def _get(self, key: str, what: str) -> str:
        # The other one may wait twice: until it listens, and until it ends.
        limit_s = 2 * self._context.timeout_s + 10
        try:
            self._context.store.wait([key], datetime.timedelta(seconds=limit_s))
        except Exception as error:  # each store raises its own
            raise PeerError(f"{self.name}: was not told within {limit_s:g} s {what} ({error})") from error
        return str(self._context.store.get(key).decode())

    def describe(self) -> dict[str, Any]:
        """Returns the version, and the port and GID that it uses."""
        return self._facts

    def teardown(self) -> None:
        """Nothing is connected between rounds."""


def bandwidth_call_s(output: str, size_bytes: int, calls: int) -> float:
    """Returns a write's time in ib_write_bw's output. Raises ToolError, and NoClockError where it told none."""
    average_mib_per_s, rate_mpps = _columns(output, size_bytes, calls, "BW average[M", 5)[1:3]
    if not (0 < average_mib_per_s < math.inf and 0 < rate_mpps < math.inf):
        raise NoClockError(_no_clock(f"{average_mib_per_s} MiB/s"))
    # Two decimals of the one, six of the other.
    if average_mib_per_s / 0.01 > rate_mpps / 1e-6:
        return size_bytes / (average_mib_per_s * 2**20)
    return 1e-6 / rate_mpps


def latency_calls_s(output: str, size_bytes: int, calls: int) -> list[float]:
    """Returns the round trips in ib_write_lat's output. Raises ToolError, and NoClockError where it told none."""
    _columns(output, size_bytes, calls, "t_avg[usec]", 6)  # at the end
    listed = output.partition("#, usec\n")[2]
    times_us = [float(one) for one in re.findall(r"^\d+, (\S+)$", listed, re.MULTILINE)]
    if len(times_us) != calls - 1:
        raise ToolError(f"printed {len(times_us)} times, not {calls - 1}")
    if not all(0 < time_us < math.inf for time_us in times_us):
        raise NoClockError(_no_clock(f"{times_us[0]} us"))
    return [2e-6 * time_us for time_us in times_us]  # it prints halves


def _columns(output: str, size_bytes: int, calls: int, heading: str, least: int) -> list[float]:
    """The numbers of the result's line but for size and iterations, by which it is known."""
    _, found, below = output.partition(heading)
    for line in below.splitlines():
        words = line.split()
        if found and words[:2] == [str(size_bytes), str(calls)] and len(words) >= least:
            with contextlib.suppress(ValueError):
                return [float(word) for word in words[2:]]
    raise ToolError(f"printed no result of {calls} times {size_bytes} B, but: {output[-_LAST_WORDS:].strip()}")


def _no_clock(value: str) -> str:
    return (
        f"told {value}: it has no rate of the processor's counter, which it takes from 'cpu MHz' of /proc/cpuinfo and "
        "from a measurement"
    )


def _times(case: Case, calls: int, output: str) -> dict[str, Any]:
    """The fields of RoundTimes that the output has."""
    if case.operation.name == "send":
        return {"parts_s": [bandwidth_call_s(output, case.size_bytes, calls)], "singles_s": []}
    times_s = latency_calls_s(output, case.size_bytes, calls)
    parts = np.array_split(np.array(times_s), min(PARTS, len(times_s)))
    every = math.ceil(len(times_s) / SINGLE_CALLS)
    return {"parts_s": [float(part.mean()) for part in parts], "singles_s": times_s[::every]}


@contextlib.contextmanager
def _started(command: Sequence[str]) -> Iterator[_Tool]:
    """A process that ends with this block, and with this process however that ends."""
    keeper = shutil.which("setpriv")
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*([keeper, "--pdeathsig", "KILL"] if keeper else []), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )
        try:
            yield _Tool(process, output, errors)
        finally:
            process.kill()
            process.wait()


def _version() -> str:
    said = subprocess.run([_TOOLS["send"], "--version"], capture_output=True, text=True, timeout=60)
    return said.stdout.strip().removeprefix("Version: ")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def _listens(port: int) -> bool:
    """Whether a process of this network namespace accepts connections there: to connect would take the client's."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            lines = Path("/proc/self/net", name).read_text().splitlines()[1:]
            if any(words[1].endswith(f":{port:04X}") and words[3] == "0A" for words in map(str.split, lines)):
                return True
    return False
