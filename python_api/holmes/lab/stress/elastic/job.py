"""One elastic job on this machine: its ranks, its store, and what stands between a rank and the store."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from holmes.lab.stress.elastic.settings import EPISODE_S, RANKS
from holmes.lab.stress.faults.messages import STACKS_SIGNAL

_LAST_LINES = 40
_POLL_S, _READ_S = 0.02, 1.0
_QUIET_S = 40.0  # one that is started again, or told anything, has at least so long for what comes next
_SERVE = """
import sys
from holmes.training.recovery.store import serve_store
serve_store(int(sys.argv[1]), lambda port: print(port, flush=True))
"""


class StoreProcess:
    """`holmes store` on loopback, to be killed, stopped and started again on the same port."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    @property
    def address(self) -> str:
        """For ranks."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Anew and empty."""
        command = [sys.executable, "-c", _SERVE, str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        """Everything in it is lost."""
        self.process.kill()
        self.process.communicate()


class Cable:
    """Between one rank and the store: `cut` swallows all that is said, without a word to either side."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """No new connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if not self.cut.is_set():
                    other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)


class Rank:
    """One process in a rank's place. `events`: what it told; `last`: its last lines of the log."""

    def __init__(self, place: int, folder: Path, store: str, environment: Mapping[str, str]) -> None:
        self.place = place
        self.started_s = time.monotonic()
        self.events: list[dict[str, Any]] = []
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        names = {"RANK": str(place), "WORLD_SIZE": str(RANKS), "HOLMES_HOSTNAME": f"n{place}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "holmes.lab.stress.elastic.worker", os.fspath(folder), store]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **names, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def steps(self) -> int:
        """The number of the last step it has told; -1 before the first."""
        told = [event["step"] for event in list(self.events) if event["event"] == "step"]
        return max(told, default=-1)

    def said(self, event: str) -> dict[str, Any] | None:
        """The first event of this name."""
        return next((entry for entry in list(self.events) if entry["event"] == event), None)

    def send(self, number: signal.Signals) -> None:
        """A signal."""
        self.process.send_signal(number)

    def last_words(self) -> str:
        """Of one that hangs: since when it runs, what it said last, and its threads' stacks."""
        age_s, said = time.monotonic() - self.started_s, list(self.last)[-5:]
        self.send(STACKS_SIGNAL)
        time.sleep(_READ_S)
        stacks = list(self.last)[-_LAST_LINES:]
        return f"after {age_s:.0f} s; it said last: {' / '.join(said)}; its stacks: {' / '.join(stacks)}"

    def wait(self, until_s: float) -> bool:
        """Whether it has ended by then (time.monotonic)."""
        try:
            self.process.wait(max(until_s - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            return False
        for reader in self._readers:
            reader.join(5)
        return True

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            if line.startswith('{"event"'):
                self.events.append(json.loads(line))
            else:
                self.last.append(line.rstrip())


class ElasticJob:
    """The ranks of a job. Leave it to end all. `all`: every process that ever was one of its ranks."""

    def __init__(
        self, folder: Path, stores: Mapping[int, str] | str, environments: Mapping[int, Mapping[str, str]] | None = None
    ) -> None:
        self.folder = folder
        self._stores = stores if isinstance(stores, Mapping) else dict.fromkeys(range(RANKS), stores)
        self._environments = environments or {}
        self.all: list[Rank] = []
        self.ranks: dict[int, Rank] = {}
        self._until_s = time.monotonic() + EPISODE_S
        self._last_s = self._until_s + EPISODE_S  # whatever comes
        self._told = 0
        for place in range(RANKS):
            self.start(place)

    def __enter__(self) -> ElasticJob:
        """For its end."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends what is left."""
        for rank in self.all:
            if rank.process.poll() is None:
                rank.send(signal.SIGKILL)
            rank.wait(time.monotonic() + 10)

    def start(self, place: int) -> Rank:
        """A process in this place; after an earlier one has ended, as a launcher does."""
        rank = Rank(place, self.folder, self._stores[place], self._environments.get(place, {}))
        self.all.append(rank)
        self.ranks[place] = rank
        return rank

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Whether it came true in the time that an episode has: longer on a machine where its steps are slow."""
        while not condition():
            self._look_for_progress()
            if time.monotonic() > self._until_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _look_for_progress(self) -> None:
        told = sum(1 + len(rank.events) for rank in self.all)
        if told != self._told:
            self._told = told
            self._until_s = max(self._until_s, min(time.monotonic() + _QUIET_S, self._last_s))

    def wait_for_step(self, step: int) -> bool:
        """Until all have done it, or one has ended."""
        ranks = list(self.ranks.values())
        return self.wait_for(
            lambda: all(r.steps() >= step for r in ranks) or any(r.process.poll() is not None for r in ranks)
        )

    def finish(self, *, restarts: bool = False) -> list[str]:
        """Waits for the end of all ranks, starting again those that failed, if asked for. Returns who did not end."""

        def ended() -> bool:
            for place, rank in list(self.ranks.items()):
                if restarts and rank.process.poll() not in (None, 0):
                    self.start(place)
            return all(rank.process.poll() is not None for rank in self.ranks.values())

        self.wait_for(ended)
        late = [rank for rank in self.ranks.values() if not rank.wait(time.monotonic() + _READ_S)]
        return [f"rank {rank.place} hangs {rank.last_words()}" for rank in late]
