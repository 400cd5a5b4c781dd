"""The faults of elastic jobs by name: what is done, and what must follow beside a right result."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from holmes.lab.stress.elastic.check import error_problems, progress_problems
from holmes.lab.stress.elastic.job import Cable, ElasticJob, StoreProcess
from holmes.lab.stress.elastic.settings import EVERY_STEPS, LEASE_S, RANKS, STEPS
from holmes.lab.stress.faults.preloaded import FaultyCalls

Fault = Callable[[Path, random.Random], tuple[str, list[str]]]
ELASTIC_FAULTS: dict[str, tuple[str, Fault]] = {}


def elastic_fault(name: str, text: str) -> Callable[[Fault], Fault]:
    """Enters a function into the catalogue."""

    def enter(fault: Fault) -> Fault:
        ELASTIC_FAULTS[name] = (text, fault)
        return fault

    return enter


@contextmanager
def _store() -> Iterator[StoreProcess]:
    store = StoreProcess()
    try:
        yield store
    finally:
        store.kill()


def _middle(choice: random.Random) -> int:
    """A step after the first two checkpoints, and by more than a lease before the last."""
    return choice.randrange(2 * EVERY_STEPS + 2, STEPS // 2)


@elastic_fault("rank-killed", "a rank of an elastic job is killed and started again")
def rank_killed(folder: Path, choice: random.Random) -> tuple[str, list[str]]:
    """The others go on without it, and it comes back."""
    step, place = _middle(choice), choice.randrange(RANKS)
    with _store() as store, ElasticJob(folder / "run", store.address) as job:
        job.wait_for_step(step)
        job.ranks[place].send(signal.SIGKILL)
        job.ranks[place].wait(time.monotonic() + 10)
        job.start(place)
        problems = job.finish()
        problems += progress_problems(job)
    return f"rank {place} is killed after step {step}", problems


@elastic_fault("disk-full", "a rank's disk is full when a checkpoint is written (ENOSPC)")
def disk_full(folder: Path, choice: random.Random) -> tuple[str, list[str]]:
    """A warning on all ranks, and training goes on until the next checkpoint, in the same generation."""
    boundary = choice.randrange(2, STEPS // EVERY_STEPS - 1) * EVERY_STEPS
    place = choice.randrange(RANKS)
    calls = FaultyCalls(folder)
    with _store() as store, ElasticJob(folder / "run", store.address, {place: calls.environment}) as job:
        job.wait_for_step(boundary - 3)
        calls.set(disk_is_full=True)
        job.wait_for_step(boundary)
        calls.set()
        problems = job.finish()
        problems += progress_problems(job, generations={1})
        for rank in job.all:
            if not any("No space left on device" in line for line in rank.last):
                problems.append(f"rank {rank.place} did not say that no space was left")
    return f"the disk of rank {place} is full at step {boundary}", problems


@elastic_fault("checkpoint-corrupt", "the newest checkpoint is truncated, and a rank is killed")
def checkpoint_corrupt(folder: Path, choice: random.Random) -> tuple[str, list[str]]:
    """The next generation goes on from the one before."""
    step, place = _middle(choice), choice.randrange(RANKS)
    with _store() as store, ElasticJob(folder / "run", store.address) as job:
        job.wait_for_step(step)
        for rank in job.ranks.values():
            rank.send(signal.SIGSTOP)  # so that none makes another one meanwhile
        newest = max((folder / "run").glob("step-*/.metadata")).parent
        part = choice.choice(sorted(path for path in newest.iterdir() if path.stat().st_size))
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
        job.ranks[place].send(signal.SIGKILL)
        for other in job.ranks.values():
            other.send(signal.SIGCONT)
        job.ranks[place].wait(time.monotonic() + 10)
        job.start(place)
        problems = job.finish()
        problems += progress_problems(job)
        if not list((folder / "run").glob("*.unreadable")):
            problems.append(f"{newest.name} was not set aside as unreadable")
    return f"{part.name} of {newest.name} is truncated and rank {place} killed", problems


@elastic_fault(
    "store-lost", "the store of an elastic job is killed, and started again empty after all ranks have ended"
)
def store_lost(folder: Path, choice: random.Random) -> tuple[str, list[str]]:
    """StoreLostError on all ranks; started again, they go on from the last checkpoint."""
    step = _middle(choice)
    with _store() as store, ElasticJob(folder / "run", store.address) as job:
        job.wait_for_step(step)
        store.kill()
        problems = job.finish()
        problems += error_problems(job.ranks.values(), "StoreLostError")
        store.start()
        for place in range(RANKS):
            job.start(place)
        problems += job.finish()
        problems += progress_problems(job)
    return f"the store is killed after step {step}", problems


@elastic_fault("store-restarted", "the store is killed and at once started again, empty, on the same port")
def store_restarted(folder: Path, choice: random.Random) -> tuple[str, list[str]]:
    """Whoever ends for that is started again; all go on, and none with the old generation."""
    step = _middle(choice)
    with _store() as store, ElasticJob(folder / "run", store.address) as job:
        job.wait_for_step(step)
        store.kill()
        store.start()
        problems = job.finish(restarts=True)
        problems += progress_problems(job)
    return f"the store is started again after step {step}", problems


@elastic_fault("store-cut", "what one rank and the store say to each other vanishes, for longer than a lease")
def store_cut(folder: Path, choice: random.Random) -> tuple[str, list[str]]:
    """It stops before the others decide, and comes back when it is started again, or reaches the store again."""
    step, place = _middle(choice), choice.randrange(RANKS)
    for_s = choice.uniform(1.2, 8) * LEASE_S
    with _store() as store, ExitStack() as stack:
        cable = Cable(store.port)
        stack.callback(cable.close)
        addresses = {**dict.fromkeys(range(RANKS), store.address), place: cable.address}
        job = stack.enter_context(ElasticJob(folder / "run", addresses))
        job.wait_for_step(step)
        cable.cut.set()
        time.sleep(for_s)
        cable.cut.clear()
        problems = job.finish(restarts=True)
        problems += progress_problems(job)
    return f"rank {place} is cut off from the store after step {step} for {for_s:.1f} s", problems


@elastic_fault("store-shared", "two elastic jobs train at once on one store, and a rank of one of them is killed")
def store_shared(folder: Path, choice: random.Random) -> tuple[str, list[str]]:
    """Each as if it were alone."""
    step, place = _middle(choice), choice.randrange(RANKS)
    with (
        _store() as store,
        ElasticJob(folder / "run", store.address) as job,
        ElasticJob(folder / "other", store.address) as other,
    ):
        job.wait_for_step(step)
        job.ranks[place].send(signal.SIGKILL)
        job.ranks[place].wait(time.monotonic() + 10)
        job.start(place)
        problems = job.finish() + other.finish()
        problems += progress_problems(job)
        problems += progress_problems(other, generations={1})
    return f"of two jobs on one store, rank {place} of one is killed after step {step}", problems


@elastic_fault("stopped-past-lease", "a rank is stopped (SIGSTOP) for longer than its lease, and goes on")
def stopped_past_lease(folder: Path, choice: random.Random) -> tuple[str, list[str]]:
    """The others decide without it; it writes nothing in the old generation and joins a later one."""
    step, place = _middle(choice), choice.randrange(RANKS)
    for_s = choice.uniform(1.1, 4) * LEASE_S
    with _store() as store, ElasticJob(folder / "run", store.address) as job:
        job.wait_for_step(step)
        job.ranks[place].send(signal.SIGSTOP)
        time.sleep(for_s)
        job.ranks[place].send(signal.SIGCONT)
        problems = job.finish()
        problems += progress_problems(job)
    return f"rank {place} is stopped after step {step} for {for_s:.1f} s", problems
