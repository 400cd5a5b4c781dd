"""Runs episodes on a testbed: long-lived ranks, commands to them, what they report, and who is started again."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from holmes.cluster.topology.file import from_dict
from holmes.lab.stress.faults.catalogue import Injection, choose_faults
from holmes.lab.stress.faults.check import Episode, EpisodeResult, check_episode
from holmes.lab.stress.faults.folder_store import FolderStore
from holmes.lab.stress.faults.messages import STACKS_SIGNAL, GroupReport, heard
from holmes.lab.stress.faults.preloaded import FalseClock, FaultyCalls, Preloaded
from holmes.lab.stress.faults.scene import Scene
from holmes.lab.stress.faults.settings import SIZES, FaultSettings
from holmes.lab.stress.groups import make_plan
from holmes.lab.stress.loops import unexpected_bytes
from holmes.lab.stress.settings import Settings
from holmes.lab.testbed import Process, Testbed, TestbedError, TestbedSession
from holmes.lab.testbed.launch import place_ranks, rank_environment

_START_S = 30.0  # of a rank's process, on a machine under load; and as many slacks
_START_SLACKS = 5
_RUNNING_S = 60.0
_LOAD_S = (0.3, 1.5)  # before the fault
_KEPT_COMMANDS = 4  # files of a rank: what is older was carried out
_HANG_S = 10.0  # beyond the limit: then a rank counts as hanging and is killed
_LAST_LINES = 100  # of a rank that hangs: the stacks of its threads are among them
_ROUND_PAUSE_S = 0.01  # faults are tried here, not rates
PRELOADED = ("clock-jump", "flipped-bit", "no-threads", "killed-at-setup", "killed-at-call")


class Driver:
    """The ranks of a testbed through many episodes. Use as a context manager. One thread."""

    def __init__(self, settings: FaultSettings, folder: Path) -> None:
        """`folder`: an empty one, on a path that the testbed's nodes see too (not below /run or /dev/shm)."""
        self.settings = settings
        self._start_s = max(_START_S, _START_SLACKS * settings.slack_s)
        self.uses: dict[str, list[Mapping[str, int]]] = {}  # by process: what it held after each episode
        self._folder = folder
        self._store = FolderStore(folder)
        self._testbed = Testbed(settings.spec)
        self._places = place_ranks(self._testbed.spec, settings.nproc_per_node)
        self._session: TestbedSession | None = None
        self._processes: list[Process | None] = [None] * len(self._places)
        self._lives = [0] * len(self._places)
        self._commands = [0] * len(self._places)
        self._events: list[list[dict[str, Any]]] = [[] for _ in self._places]
        self._printed: list[list[str]] = [[] for _ in self._places]
        self._records = folder / "records"
        self._records.mkdir()
        self.lacks: dict[str, str] = {}  # faults that this machine cannot inject, and why
        self._clock: FalseClock | None = None
        self._calls: FaultyCalls | None = None
        try:
            self._clock, self._calls = FalseClock(folder), FaultyCalls(folder)
        except OSError as error:
            self.lacks = dict.fromkeys(PRELOADED, str(error))
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Driver:
        """Builds the testbed, starts the ranks and lets them discover their topology."""
        with self._stack:
            self._session = self._stack.enter_context(self._testbed.session())
            for rank in range(len(self._places)):
                self._start(rank)
            everybody = range(len(self._places))
            self._require("ready", everybody)
            self._command(everybody, op="discover", name="topology-of-all")
            self._require("discovered", everybody)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the ranks and the testbed."""
        self._stack.close()

    @property
    def session(self) -> TestbedSession:
        """The testbed's."""
        assert self._session is not None, "enter the driver first"
        return self._session

    @property
    def nodes(self) -> list[str]:
        """Each rank's node."""
        return [node for node, _ in self._places]

    def run(self, number: int) -> tuple[Episode, EpisodeResult]:
        """One episode, from set-up to clean-up. Raises TestbedError where the testbed itself fails."""
        choice = self.settings.choice(number)
        tensor, pipeline = choice.choice(SIZES)
        load_s = choice.uniform(*_LOAD_S)
        load = self._load_settings(tensor, pipeline, choice.randrange(2**31))
        plan = make_plan(from_dict(json.loads(self._store.get("topology"))), load)
        store = self._store.below(f"episode{number}")
        processes = [process for process in self._processes if process is not None]
        scene = Scene(
            self.session,
            plan,
            self.nodes,
            processes,
            store,
            self._clocks(),
            self._faulty_calls(),
            self._records,
            self.settings.has_integrity,
        )
        injections = choose_faults(self.settings, number, scene)
        for printed in self._printed:
            printed.clear()
        ranks = range(len(self._places))
        tamper = {rank: faults for injection in injections for rank, faults in injection.tamper.items()}
        at_setup = any(injection.expect.at_setup for injection in injections)
        start_s = time.monotonic()
        for rank in ranks:
            self._command([rank], op="episode", number=number, settings=vars(load), tamper=tamper.get(rank, {}))
        silent = frozenset[int]().union(*(injection.silent for injection in injections))
        ended = frozenset[int]().union(*(injection.ended for injection in injections))
        survivors = frozenset(ranks) - silent - ended
        limit_s = (self.settings.connect_timeout_s if at_setup else self.settings.timeout_s) + self.settings.slack_s
        injected_s = start_s
        if not at_setup:
            self._await(("running", "ended"), ranks, _RUNNING_S, number)
            time.sleep(load_s)
            injected_s = self._inject(injections)
            self._hold(injections, survivors, number, limit_s, store)
        acted_s = time.monotonic()
        self._await("ended", survivors, max(injected_s + limit_s, acted_s) + _HANG_S - time.monotonic(), number)
        reports = self._reports(survivors, number)
        for injection in reversed(injections):
            if injection.heal is not None:
                injection.heal()
        episode = Episode(number, injections, injected_s, limit_s, survivors, reports, self._warnings())
        checked = check_episode(episode)
        problems = list(checked.problems)
        problems += self._clean_up(number, silent, ended, survivors - set(reports), limit_s)
        return episode, EpisodeResult(tuple(problems), checked.outcome, checked.report_s, checked.errors)

    def _load_settings(self, tensor: int, pipeline: int, seed: int) -> Settings:
        settings = self.settings
        return Settings(
            seconds=3600.0,  # until it is told to stop
            seed=seed,
            max_bytes=settings.max_bytes,
            tensor=tensor,
            pipeline=pipeline,
            timeout_s=settings.timeout_s,
            connect_timeout_s=settings.connect_timeout_s,
            pause_s=_ROUND_PAUSE_S,
        )

    def _inject(self, injections: Sequence[Injection]) -> float:
        """Breaks one after the other; returns when the one began that somebody has to report."""
        begun_s = []
        for injection in injections:
            begun_s.append(time.monotonic())
            if injection.act is not None:
                injection.act()
        must = [at for at, injection in zip(begun_s, injections, strict=True) if injection.expect.must_fail]
        may = [at for at, injection in zip(begun_s, injections, strict=True) if injection.expect.must_fail is None]
        return (must or may or begun_s or [time.monotonic()])[0]

    def _hold(
        self,
        injections: Sequence[Injection],
        survivors: frozenset[int],
        number: int,
        limit_s: float,
        store: FolderStore,
    ) -> None:
        """Lets the load live with the faults; where nothing fails, tells it to stop."""
        if any(injection.expect.must_fail for injection in injections):
            return
        can_fail = any(injection.expect.must_fail is None for injection in injections)
        hold_s = limit_s if can_fail else max((injection.hold_s for injection in injections), default=1.0)
        if not self._await("ended", survivors, hold_s, number):
            store.set("stop", b"")

    def _clean_up(
        self, number: int, silent: frozenset[int], ended: frozenset[int], hanging: frozenset[int], limit_s: float
    ) -> list[str]:
        """Collects late ranks, starts those that are gone again, and measures all. Returns problems."""
        problems = []
        for rank in hanging:
            process = self._processes[rank]
            if process is not None and process.returncode is None:
                process.kill(STACKS_SIGNAL)  # it prints where its threads are
        late = silent | hanging
        if late and not self._await("ended", late, limit_s + _HANG_S, number):
            lost = late - set(self._reports(late, number))
            problems += [f"rank {rank} did not end after it went on" for rank in sorted(lost & silent)]
            problems += [self._last_words(rank) for rank in sorted(lost)]
            ended |= lost
        for rank, reports in self._reports(silent, number).items():
            bad = [report for report in reports if report.error in ("", "Hang", "WrongResult")]
            problems += [f"rank {rank}, {report.kind} group, went on as if nothing were: {report}" for report in bad]
        for rank in range(len(self._places)):
            process = self._processes[rank]
            if rank in ended and process is not None and process.returncode is None:
                process.kill(group=True)
                process.wait(self._start_s)
            if process is None or process.returncode is not None:
                if rank not in ended:
                    code = None if process is None else process.returncode
                    problems.append(f"rank {rank}'s process ended with {code}: {self._printed[rank][-5:]}")
                self._start(rank)
                ended |= {rank}
        if not self._await("ready", ended, self._start_s):
            problems.append(f"ranks {sorted(ended)} did not start again within {self._start_s:g} s")
        self._measure(number)
        shutil.rmtree(self._folder / f"episode{number}", ignore_errors=True)
        return problems

    def _last_words(self, rank: int) -> str:
        process = self._processes[rank]
        code = None if process is None else process.returncode
        state = "runs" if code is None else f"ended with {code}"
        return f"rank {rank} {state}; it said last: {self._printed[rank][-_LAST_LINES:] or 'nothing'}"

    def _measure(self, number: int) -> None:
        ranks = range(len(self._places))
        self._command(ranks, op="measure", number=number)
        if not self._await("use", ranks, self._start_s, number):
            return
        for rank in ranks:
            use = next(e["use"] for e in self._events[rank] if e["event"] == "use" and e["number"] == number)
            self.uses.setdefault(f"rank {rank}, process {self._lives[rank]}", []).append(use)
            self._events[rank].clear()

    def _start(self, rank: int) -> None:
        node = self._places[rank][0]
        self._lives[rank] += 1
        self._events[rank].clear()
        env = {**rank_environment(self._testbed.spec, self._places, rank), "OMP_NUM_THREADS": "1"}
        env["HOLMES_INTEGRITY"] = str(int(self.settings.has_integrity))
        env["HOLMES_INTEGRITY_DIGEST_EVERY"] = "3" if self.settings.has_integrity else "0"
        env["HOLMES_UNEXPECTED_BYTES"] = str(unexpected_bytes(self.settings.max_bytes))
        env["HOLMES_FLIGHT_RECORDER_DIR"] = str(self._records)
        worker = [sys.executable, "-m", "holmes.lab.stress.faults.worker", str(self._folder), str(self._commands[rank])]
        library: Preloaded | None = self._clocks().get(rank) or self._faulty_calls().get(rank)
        if library is not None:
            worker = ["env", *(f"{name}={value}" for name, value in library.environment.items()), *worker]

        def on_line(line: str) -> None:
            event = heard(line)
            if event is not None:
                self._events[rank].append(event)
            else:
                self._printed[rank].append(line)
            if process is not None:
                process.lines.clear()  # it would hold all of a long run

        process: Process | None = None
        process = self._processes[rank] = self.session.spawn(node, worker, env, on_line=on_line)

    def _clocks(self) -> dict[int, FalseClock]:
        """The last rank has a clock of its own, where there is one."""
        return {len(self._places) - 1: self._clock} if self._clock is not None else {}

    def _faulty_calls(self) -> dict[int, FaultyCalls]:
        """The first rank of the second half has system calls that can err, where there are any."""
        return {len(self._places) // 2: self._calls} if self._calls is not None else {}

    def _command(self, ranks: Sequence[int] | range, **command: Any) -> None:
        for rank in ranks:
            self._store.set(f"command/{rank}/{self._commands[rank]}", json.dumps(command))
            self._store.delete(f"command/{rank}/{self._commands[rank] - _KEPT_COMMANDS}")
            self._commands[rank] += 1

    def _await(self, kinds: str | tuple[str, ...], ranks: Any, timeout_s: float, number: int | None = None) -> bool:
        """Waits until each of `ranks` has told one of these events; False after `timeout_s`."""
        kinds = (kinds,) if isinstance(kinds, str) else kinds

        def told(rank: int) -> bool:
            return any(e["event"] in kinds and number in (None, e.get("number")) for e in list(self._events[rank]))

        return self.session.wait_until(lambda: all(told(rank) for rank in ranks), max(timeout_s, 0.0))

    def _require(self, kind: str, ranks: Any) -> None:
        if not self._await(kind, ranks, self._start_s):
            said = {rank: lines[-5:] for rank, lines in enumerate(self._printed) if lines}
            raise TestbedError(f"the ranks were not {kind} within {self._start_s:g} s; they said {said or 'nothing'}")

    def _reports(self, ranks: Any, number: int) -> dict[int, list[GroupReport]]:
        found = {}
        for rank in ranks:
            for event in list(self._events[rank]):
                if event["event"] == "ended" and event["number"] == number:
                    found[rank] = [GroupReport.from_dict(report) for report in event["reports"]]
        return found

    def _warnings(self) -> dict[str, list[str]]:
        lines: dict[str, list[str]] = defaultdict(list)
        for rank, node in enumerate(self.nodes):
            lines[node] += self._printed[rank]
        return dict(lines)
