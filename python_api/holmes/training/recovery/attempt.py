"""Attempt: one generation on this process, from making its groups to its end, whatever that is."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch.distributed as dist

from holmes.cluster.probe import discover_topology
from holmes.cluster.topology import Topology
from holmes.planning.plan.plan import Plan
from holmes.training.recovery.agreement import Decision
from holmes.training.recovery.checkpoints import Checkpoints
from holmes.training.recovery.errors import CheckpointError, FencedError, StoreLostError, UnequalStepsError
from holmes.training.recovery.generation import Generation, Regroup
from holmes.training.recovery.member import Member
from holmes.training.recovery.rebuild import abort_groups, drop_groups, start_groups
from holmes.training.recovery.rendezvous import LEFT, Rendezvous
from holmes.training.recovery.store import InterruptibleStore
from holmes.training.recovery.watch import Watch
from holmes_comm.errors import (
    CommunicatorError,
    HolmesError,
    NicError,
    PeerLostError,
    TimeoutError,
    UnreachableError,
)

_log = logging.getLogger(__name__)


class Outcome(Enum):
    """How a generation ended on this process."""

    FINISHED = "finished"
    LEFT = "left at a boundary"
    FAILED = "failed"


@dataclass(frozen=True)
class RecoverySettings:
    """What all generations share."""

    train: Callable[[Generation], Any]
    plan: Callable[[Topology], Plan]
    checkpoints: Checkpoints
    every_steps: int
    backend: str
    timeout_s: float
    measure_s: float
    recover_from: tuple[type[BaseException], ...]


@dataclass
class Attempt:
    """One generation on this process. `value`: what training returned; `saved_step`: of its last checkpoint."""

    settings: RecoverySettings
    rendezvous: Rendezvous
    watch: Watch
    me: Member
    decision: Decision
    value: Any = None
    saved_step: int | None = None
    _store: InterruptibleStore | None = None

    def run(self) -> Outcome:
        """Collective over the generation's members. Raises what training raises where that is no failure of others."""
        number, members = self.decision.number, self.decision.members
        self.watch.follow(number, members, abort_groups)
        try:
            return self._train()
        except Regroup:
            self.rendezvous.end(number, LEFT)
            return Outcome.LEFT
        except Exception as error:
            abort_groups()
            reason = self._end(f"{self.me}: {_reason(error)}")
            if (host := _blamed_host(error)) is not None:
                self.rendezvous.blame(number, self.me.node, host)
            if not self._is_recoverable(error):
                raise
            _log.warning("generation %d failed: %s", number, reason)
            _forget(error)
            return Outcome.FAILED
        except BaseException as error:  # Ctrl-C, sys.exit
            abort_groups()
            self.rendezvous.end(number, f"{self.me} ended by {type(error).__name__}")
            raise
        finally:
            self.watch.leave()
            drop_groups()

    def _train(self) -> Outcome:
        started_s = time.monotonic()
        generation = self._start()
        ready_s = time.monotonic()
        try:
            self.value = self.settings.train(generation)
            if generation.is_left:  # and training has caught the exception
                raise Regroup
            dist.barrier()  # whoever comes here knows that all have come to their end
        finally:
            self.saved_step = generation.saved_step
            _log.info(
                "generation %d on rank %d: groups and plan %.2f s, training %.2f s; %d descriptors, %d threads",
                *(generation.number, generation.rank, ready_s - started_s, time.monotonic() - ready_s),
                *(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))),
            )
        self.rendezvous.finish()
        return Outcome.FINISHED

    def _start(self) -> Generation:
        number, members, settings = self.decision.number, self.decision.members, self.settings
        rank = [member.identity for member in members].index(self.me.identity)
        prefixed = dist.PrefixStore(f"{self.rendezvous.prefix}/{number}/groups", self.rendezvous.store)
        # Kept: torch's groups hold only the C++ half of a store, which is nothing without this one.
        store = self._store = InterruptibleStore(prefixed, self.watch.failure, settings.timeout_s)
        start_groups(store, rank, len(members), settings.backend, settings.timeout_s)
        topology = discover_topology(store, rank, len(members), "holmes/recovery", 3.0, settings.measure_s)
        plan = settings.plan(topology)
        if rank == 0:
            _log.info("generation %d:\n%s", number, plan.describe())
        return Generation(
            number, members, rank, topology, plan, settings.checkpoints, settings.every_steps, settings.backend,
            self.watch.can_grow, lambda: self._fence(settings.checkpoints.claim),
            lambda: self._fence(settings.checkpoints.check_claim), self.watch.raise_if_failed,
        )  # fmt: skip

    def _fence(self, claim: Callable[[int, str, int], None]) -> None:
        """Raises unless this generation still is the one that may write: by its lease, and by the folder itself."""
        self.watch.hold_lease()
        claim(self.decision.number, self.rendezvous.token, self.rendezvous.floor)

    def _end(self, reason: str) -> str:
        try:
            return self.rendezvous.end(self.decision.number, reason)
        except StoreLostError as error:
            raise type(error)(f"{self.watch.failure() or reason}; {error}") from error

    def _is_recoverable(self, error: Exception) -> bool:
        if isinstance(error, (CheckpointError, FencedError, UnequalStepsError)):
            return False  # all ranks have it, and would have it again
        for cause in _chain(error):  # torch's pipeline schedules raise an error of their own from what they meet
            if isinstance(cause, (CommunicatorError, dist.DistError, *self.settings.recover_from)):
                return True
            if isinstance(cause, NicError):  # another rank's NIC is down: that one ends, the others go on without it
                mine = [member.identity for member in self.decision.members].index(self.me.identity)
                return self.decision.number > 1 and cause.rank not in (None, mine)
        return self.watch.failure() is not None  # what an abort leads to is not always told as such


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _reason(error: BaseException) -> str:
    """The first cause that says something about communication, else the error itself."""
    found = next((cause for cause in _chain(error) if isinstance(cause, HolmesError)), error)
    return f"{type(found).__name__}: {found}"


def _blamed_host(error: BaseException) -> str | None:
    """The host that this error says is lost or cut off, or the one that did not come in time."""
    for cause in _chain(error):
        if isinstance(cause, UnreachableError) and (cause.peer, cause.rank) != (None, None):  # not that of a store
            return cause.host or None
        if isinstance(cause, (PeerLostError, TimeoutError)) and cause.peer is not None:
            return cause.host or None
    return None


def _forget(error: BaseException) -> None:
    """Lets go of what the frames of a failed training function hold: model, buffers and groups."""
    for cause in _chain(error):
        traceback.clear_frames(cause.__traceback__)
