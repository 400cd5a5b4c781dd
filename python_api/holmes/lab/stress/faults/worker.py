"""A rank that lives through many episodes: `python -m holmes.lab.stress.faults.worker FOLDER FIRST_COMMAND`.

Commands come through the folder (`command/RANK/NUMBER`), answers go to stdout (messages). In each episode it makes its
groups' communicators, loads them until it is told to stop or something fails, and drops them; the process goes on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import sys
import time
from typing import Any

import numpy as np

from holmes.cluster.probe import discover_topology
from holmes.cluster.topology import Topology
from holmes.cluster.topology.file import from_dict, to_dict
from holmes.lab.stress.faults.folder_store import FolderStore
from holmes.lab.stress.faults.leaks import settled_use
from holmes.lab.stress.faults.messages import STACKS_SIGNAL, GroupReport, tell
from holmes.lab.stress.faults.reports import (
    ALARM,
    Alarm,
    AlarmedStore,
    first_cause,
    passed_on,
    report_of,
    report_of_run,
)
from holmes.lab.stress.faults.tamper import little_memory, make_records_hang, tampered
from holmes.lab.stress.groups import groups_of, make_communicator, make_plan
from holmes.lab.stress.loops import Loop
from holmes.lab.stress.run import GroupRun
from holmes.lab.stress.settings import Settings
from holmes.planning.groups.group import Group
from holmes.planning.plan.plan import Plan
from holmes_comm import Communicator

_POLL_S = 0.02
_COMMAND_LIMIT_S = 1800.0  # the driver is gone


class Worker:
    """One rank. One thread, beside those of the groups of an episode."""

    def __init__(self, store: FolderStore, rank: int, size: int, first_command: int) -> None:
        self._store, self._rank, self._size, self._next = store, rank, size, first_command
        self._topology: Topology | None = None
        self._has_loaded = False
        self._least_use: dict[str, int] = {}  # of an episode, since the I/O thread is there

    def serve(self) -> None:
        """Carries out commands until it is told to quit. Raises TimeoutError where none comes for long."""
        np.random.default_rng(0)  # loaded when first used, which must not be where no descriptor is left
        tell("ready")
        while True:
            key = f"command/{self._rank}/{self._next}"
            self._store.wait([key], _COMMAND_LIMIT_S)
            command = json.loads(self._store.get(key))
            self._next += 1
            if command["op"] == "quit":
                return
            getattr(self, f"do_{command['op']}")(command)

    def do_discover(self, command: dict[str, Any]) -> None:
        """Collective over all ranks: the topology, which later commands use; ranks that start later read it."""
        topology = discover_topology(self._store, self._rank, self._size, command["name"], measure_s=0.0)
        if self._rank == 0:
            self._store.set("topology", json.dumps(to_dict(topology)))
        tell("discovered")

    def do_measure(self, command: dict[str, Any]) -> None:
        """What this process holds."""
        gc.collect()
        use = settled_use(self._least_use if self._has_loaded else {})
        tell("use", number=command["number"], use=use)

    def do_episode(self, command: dict[str, Any]) -> None:
        """Collective over all ranks, for those that live through it: set-up, load, the reports of all groups."""
        number = command["number"]
        settings = Settings(**command["settings"])
        store = self._store.below(f"episode{number}")
        plan = self._plan(settings)
        groups = groups_of(plan, self._rank)
        made: list[tuple[str, int, Group, Communicator]] = []
        failed = None
        with tampered(store, command.get("tamper", {})) as seen_store:
            for kind, (row, group) in groups.items():
                try:
                    communicator = make_communicator(kind, row, group, AlarmedStore(seen_store), self._rank, settings)
                except (Exception, Alarm) as error:  # whatever it is: reported, the process goes on
                    failed = report_of(error, kind, group.ranks, self._rank)
                    break
                made.append((kind, row, group, communicator))
        if failed is not None:
            failed = first_cause(store, failed, self._rank)
            if not store.check([ALARM]):
                store.set(ALARM, passed_on(failed))  # those who wait for this rank in other groups
            for *_, communicator in made:
                communicator.abort(passed_on(failed))
            reports = [failed]
        else:
            reports = self._load(store, made, settings, number)
        made.clear()
        tell("ended", number=number, reports=[report.to_dict() for report in reports])

    def _plan(self, settings: Settings) -> Plan:
        if self._topology is None:
            self._topology = from_dict(json.loads(self._store.get("topology")))
        return make_plan(self._topology, settings)

    def _load(
        self,
        store: FolderStore,
        made: list[tuple[str, int, Group, Communicator]],
        settings: Settings,
        number: int,
    ) -> list[GroupReport]:
        runs = [
            GroupRun(group, communicator, Loop(kind, row, self._rank, communicator, settings))
            for kind, row, group, communicator in made
        ]

        def abort_all(failed: GroupRun) -> None:
            for run in runs:
                if run is not failed:
                    run.communicator.abort(passed_on(report_of_run(failed, self._rank)))

        self._has_loaded = True
        for run in runs:
            run.start(time.monotonic() + settings.seconds, abort_all)
        tell("running", number=number)
        hard_end_s = time.monotonic() + settings.seconds + settings.round_limit_s
        limits, has_little = contextlib.ExitStack(), False
        while any(run.thread.is_alive() for run in runs) and time.monotonic() < hard_end_s:
            if store.check(["stop"]):
                for run in runs:
                    run.loop.stop()
            for run in runs:
                if store.check([f"mistake/{run.group.kind}/{self._rank}"]):
                    run.loop.make_mistake()
                if store.check([f"unasked/{run.group.kind}/{self._rank}"]):
                    run.loop.send_unasked()
            if store.check([f"hang/{self._rank}"]):
                make_records_hang()
            if store.check([f"memory/{self._rank}"]) and not has_little:
                has_little = True
                limits.enter_context(little_memory(int(store.get(f"memory/{self._rank}"))))
            time.sleep(_POLL_S)
        for run in runs:
            run.thread.join(0 if run.thread.is_alive() else None)
        limits.close()
        return [report_of_run(run, self._rank) for run in runs]


def main() -> None:
    """Serves until told to quit."""
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL)
    folder, first_command = sys.argv[1], int(sys.argv[2])
    Worker(FolderStore(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), first_command).serve()


if __name__ == "__main__":
    main()
