"""The loop around training: agree on who is there, train with them; after a failure or when others come, again."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from holmes.cluster.topology import Topology
from holmes.planning.plan.plan import Plan
from holmes.training.recovery.agreement import Rules, agree, next_generation
from holmes.training.recovery.attempt import Attempt, Outcome, RecoverySettings
from holmes.training.recovery.checkpoints import Checkpoints
from holmes.training.recovery.errors import NoProgressError, StoreLostError
from holmes.training.recovery.generation import Generation
from holmes.training.recovery.member import Member, place_from
from holmes.training.recovery.rendezvous import Rendezvous
from holmes.training.recovery.watch import Watch
from holmes_comm.errors import UsageError

_log = logging.getLogger(__name__)
T = TypeVar("T")


def run_elastic(
    train: Callable[[Generation], T],
    *,
    plan: Callable[[Topology], Plan],
    checkpoints: str | Path,
    every_steps: int,
    store: str | None = None,
    place: int | None = None,
    rules: Rules | None = None,
    backend: str = "holmes",
    timeout_s: float = 300.0,
    heartbeat_s: float = 0.5,
    dead_after_s: float = 10.0,
    measure_s: float = 0.0,
    keep: int = 2,
    max_failures: int = 5,
    recover_from: tuple[type[Exception], ...] = (),
) -> T | None:
    """Runs `train(generation)` with whoever is there, again after each failure. Every process of the job calls it.

    Args:
        train: makes its model, optimizer and so on anew at each call, for `generation.plan` on `generation.groups`,
            gives them to `generation.restore` and does `generation.steps(until)`. Must keep no tensors or groups of an
            earlier call. An exception that is no failure of communication ends this process; the others go on.
        plan: topology of those who are there -> plan, equal on all ranks, such as `holmes.workable_plan` with sizes.
        checkpoints: a folder that all hosts share, and no other job; the job's name on the store is kept in it.
        every_steps: steps between two of them; `keep` stay.
        store: "host:port" of `holmes store`, or "etcd://[user:password@]host:port,host:port,..." of an etcd 3
            ("etcds://" over TLS); None: HOLMES_STORE.
        place: where this process stands; one that is started again has the lost one's. None: RANK.
        rules: when a generation is decided (see Rules); None: the first one waits for WORLD_SIZE ranks.
        timeout_s: of an operation of the default group and of the plan's groups, and of setting them up.
        heartbeat_s: how often a process shows that it lives; dead_after_s: silent for so long, it is given up.
        measure_s: as in `gather_topology`. max_failures: so many without a checkpoint in between raise NoProgressError.
        recover_from: exceptions to recover from, beside CommunicatorError and torch's own distributed errors.

    Returns what `train` returned; None where the job ended without this process being in it. Raises what `train`
    raises, StoreLostError, StoreContentError, TooFewRanksError, ReplacedError, LeftOutError, NoProgressError,
    CheckpointError, FencedError.
    """
    if every_steps < 1:
        raise UsageError(f"every_steps={every_steps} must be at least 1")
    if not 0 < 4 * heartbeat_s <= dead_after_s:
        raise UsageError(
            f"heartbeat_s={heartbeat_s} must be above 0 and at most a quarter of dead_after_s={dead_after_s}"
        )
    if rules is not None and rules.lease_s < 4 * heartbeat_s:
        raise UsageError(f"Rules.lease_s={rules.lease_s} must be at least 4 times heartbeat_s={heartbeat_s}")
    if dist.is_initialized():
        raise UsageError("run_elastic makes the default process group itself; remove init_process_group before it")
    own_place, ranks, node, node_ranks = place_from(os.environ, place, rules.first_ranks if rules else None)
    rules = rules or Rules(ranks, lease_s=max(Rules.lease_s, 4 * heartbeat_s))
    rules = replace(rules, silent_s=max(rules.silent_s, 4 * heartbeat_s))
    address = store or os.environ.get("HOLMES_STORE")
    if not address:
        raise UsageError(
            "no store: start `holmes store --listen ADDRESS` on a host that outlives the job's and set "
            "HOLMES_STORE=host:port, or that of an etcd, etcd://host:port,..., or give store="
        )
    folder = Checkpoints(checkpoints, keep)
    settings = RecoverySettings(train, plan, folder, every_steps, backend, timeout_s, measure_s, recover_from)
    answer_s = 6 * rules.lease_s  # a store that is slower than a lease fails a generation, one that is silent the job
    rendezvous = Rendezvous(address, rules.join_timeout_s, answer_s, folder.identity())
    rendezvous.enter_run(folder.newest_generation())
    lease_s = rendezvous.settle_seconds("lease_s", rules.lease_s)
    if lease_s != rules.lease_s:
        raise UsageError(
            f"Rules.lease_s is {rules.lease_s} here and {lease_s} on another rank; it must be equal on all"
        )
    me = Member(rendezvous.new_identity(), own_place, node, node_ranks)
    watched = Rendezvous(address, rules.join_timeout_s, answer_s, rendezvous.job)
    watch = Watch(watched, me, heartbeat_s, dead_after_s, rules.whole_nodes, rules.lease_s, rules.hung_after_s)
    try:
        return _until_done(settings, rendezvous, watch, me, rules, max_failures)
    finally:
        watch.close()
        if not rendezvous.is_lost and watch.lost_store is None:
            with contextlib.suppress(StoreLostError):
                rendezvous.leave(me)


def _until_done(
    settings: RecoverySettings, rendezvous: Rendezvous, watch: Watch, me: Member, rules: Rules, max_failures: int
) -> T | None:
    attempts, failures, progress = 0, 0, -1
    value: T | None = None
    number = next_generation(rendezvous)
    while True:
        started_s = time.monotonic()
        decision = agree(rendezvous, me, number, rules, watch.raise_if_lost)
        if decision is None:
            if not attempts:
                _log.warning("the job has ended without %s, which came too late", me)
            return value
        _log.info(
            "generation %d: %s; agreed after %.2f s",
            *(decision.number, ", ".join(map(str, decision.members)), time.monotonic() - started_s),
        )
        attempts += 1
        attempt = Attempt(settings, rendezvous, watch, me, decision)
        outcome = attempt.run()
        value = attempt.value  # of one that failed while all were leaving at the end of the job, too
        if outcome is Outcome.FINISHED:
            return value
        number = decision.number + 1
        saved = -1 if attempt.saved_step is None else attempt.saved_step
        failures = 0 if outcome is Outcome.LEFT or saved > progress else failures + 1
        progress = max(progress, saved)
        if failures >= max_failures:
            raise NoProgressError(
                f"{failures} generations one after another failed without a checkpoint later than step {progress}; the "
                "log says why each did; start the job again when that is mended, or raise max_failures"
            )
