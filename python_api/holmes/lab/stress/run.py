"""One rank's part of a stress run: all its groups at once, each on a thread; a failure ends them all.

Rank 0 gathers the results; ranks that are gone do not keep it waiting.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from holmes.cluster.probe import discover_topology
from holmes.cluster.topology import Topology
from holmes.lab.stress.groups import groups_of, make_communicator, make_plan, sent_bytes
from holmes.lab.stress.loops import Loop
from holmes.lab.stress.result import GroupResult, RankResult, StressResult, WrongResultError
from holmes.lab.stress.settings import Settings
from holmes.planning.groups.group import Group
from holmes_comm import AbortedError, Communicator, HolmesError, PeerLostError

_SLACK_S = 10.0  # beyond all deadlines
_PROGRESS_S = 1.0
_STOP_S = 1.0
#: For a thread whose communicator was aborted: it may be checking a large result.
_ABORTED_S = 3.0
_INTERRUPTED = "the stress run was interrupted"

#: Called with the seconds gone and the loops, about once a second.
OnProgress = Callable[[float, list[Loop]], None]


def run_stress(
    store: Any, rank: int, size: int, name: str, settings: Settings, on_progress: OnProgress | None = None
) -> tuple[RankResult, Topology]:
    """Collective over `size` ranks, with equal settings. This rank's result, also after failures, and the topology.

    `name` must be new in the store. Ends within `settings.seconds`, the set-up and one round more; on KeyboardInterrupt
    after the round that is under way, for all ranks of this one's groups, with what was done till then; a round that
    lasts is left unfinished, which is no failure. Raises ValueError where the sizes do not fit the topology,
    HolmesError where groups cannot be made.
    """
    topology = discover_topology(store, rank, size, f"{name}/topology", measure_s=0.0)
    plan = make_plan(topology, settings)
    runs = []
    for kind, (row, group) in groups_of(plan, rank).items():
        communicator = make_communicator(kind, row, group, store, rank, settings)
        runs.append(GroupRun(group, communicator, Loop(kind, row, rank, communicator, settings)))
    start_s = time.monotonic()

    def abort_all(failed: GroupRun) -> None:
        for run in runs:
            run.communicator.abort(f"the {failed.group.kind} group of the stress run failed: {failed.failure}")

    for run in runs:
        run.start(start_s + settings.seconds, abort_all)
    is_interrupted = False
    try:
        _join(runs, start_s, settings, on_progress)
    except KeyboardInterrupt:
        is_interrupted = True
        _stop(runs)
    results = tuple(run.result() for run in runs)
    return RankResult(rank, topology.host_of(rank).name, results, is_interrupted=is_interrupted), topology


def _join(runs: list[GroupRun], start_s: float, settings: Settings, on_progress: OnProgress | None) -> None:
    hard_end_s = start_s + settings.seconds + settings.round_limit_s + _SLACK_S
    while any(run.thread.is_alive() for run in runs) and time.monotonic() < hard_end_s:
        next((run for run in runs if run.thread.is_alive()), runs[0]).thread.join(_PROGRESS_S)
        if on_progress is not None:
            on_progress(time.monotonic() - start_s, [run.loop for run in runs])


def _stop(runs: list[GroupRun]) -> None:
    """Ends the rounds with those who still answer, soon: who sent the signal will not wait long."""
    for run in runs:
        run.loop.stop()
    end_s = time.monotonic() + _STOP_S
    for run in runs:
        run.thread.join(max(end_s - time.monotonic(), 0.0))
    for run in runs:
        if run.thread.is_alive():
            run.communicator.abort(_INTERRUPTED)
    end_s = time.monotonic() + _ABORTED_S
    for run in runs:
        run.thread.join(max(end_s - time.monotonic(), 0.0))


class GroupRun:
    """One group's loop on a thread of its own. `failure` and, once it has ended, `end_s` (time.monotonic) are final."""

    def __init__(self, group: Group, communicator: Communicator, loop: Loop) -> None:
        self.group, self.communicator, self.loop = group, communicator, loop
        self.failure: Exception | None = None
        self._start_s = self.end_s = time.monotonic()
        self._before = sent_bytes(communicator)
        self.thread = threading.Thread(target=self._run, name=f"stress {group.kind}", daemon=True)

    def start(self, end_s: float, on_failure: Callable[[GroupRun], object]) -> None:
        """Starts the loop; `on_failure` is called on its thread."""
        self._until_s, self._on_failure = end_s, on_failure
        self.thread.start()

    def result(self) -> GroupResult:
        """What it came to; a loop that still runs has failed."""
        alive = self.thread.is_alive()
        failure = "it still runs, though every operation has a deadline" if alive else ""
        if self.failure is not None:
            failure = f"{type(self.failure).__name__}: {self.failure}"
        is_wrong = isinstance(self.failure, WrongResultError)
        lost = self.failure.peer if isinstance(self.failure, PeerLostError) else None
        moved = {nic: count - self._before.get(nic, 0) for nic, count in sent_bytes(self.communicator).items()}
        return GroupResult(
            kind=self.group.kind,
            ranks=self.group.ranks,
            rounds=self.loop.round - self.loop.first_round,
            operations=self.loop.operations,
            checked_bytes=self.loop.checked_bytes,
            sent_bytes=moved,
            seconds=(time.monotonic() if alive else self.end_s) - self._start_s,
            failure=str(self.failure) if is_wrong else failure,
            failed_round=self.loop.round,
            is_wrong=is_wrong,
            lost_rank=None if lost is None else self.group.ranks[lost],
        )

    def _run(self) -> None:
        self._start_s = time.monotonic()
        try:
            self.loop.run(self._until_s)
        except HolmesError as error:
            if not (isinstance(error, AbortedError) and _INTERRUPTED in str(error)):  # on this rank or on another
                self.failure = error
        except Exception as error:  # a fault of ours: reported, never a silent end of the thread
            self.failure = error
            raise
        finally:
            self.end_s = time.monotonic()
            if self.failure is not None:
                self._on_failure(self)


def gather_results(
    store: Any, size: int, name: str, mine: RankResult, topology: Topology, wait_s: float
) -> StressResult | None:
    """Collective, for those that are left: the whole result on rank 0, None on the others. Bounded by `wait_s`."""
    store.set(f"{name}/result/{mine.rank}", json.dumps(mine.to_dict()))
    if mine.rank != 0:
        return None
    deadline_s = time.monotonic() + wait_s
    found, missing = [], []
    for rank in range(size):
        key = f"{name}/result/{rank}"
        try:
            store.wait([key], timedelta(seconds=max(deadline_s - time.monotonic(), 0.01)))
            found.append(RankResult.from_dict(json.loads(store.get(key))))
        except RuntimeError:  # torch's DistStoreError: it did not come in time
            missing.append(rank)
    classes = {(host.name, port.name): port.nic_class for host in topology.hosts for port in host.ports}
    return StressResult(tuple(found), tuple(missing), classes)
