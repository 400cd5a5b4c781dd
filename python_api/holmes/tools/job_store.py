"""A job's meeting place for command-line tools: the store that the launcher's variables name, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from holmes.words import some
from holmes_comm.errors import JobError, UnreachableError, UsageError
from holmes_comm.launch import recognize

_LEAVE_S = 10.0
_PROBE_S = 0.01


@dataclass(frozen=True)
class JobStore:
    """As Launch.open_store gives it, and this process's place in the job."""

    store: Any
    rank: int
    size: int


def in_job() -> bool:
    """Whether a launcher started this process as one of a job."""
    return recognize() is not None


@contextmanager
def join_job(name: str, join_timeout_s: float) -> Iterator[JobStore]:
    """Collective. Meets the other ranks, and leaves together: rank 0 may serve the store, so it goes last.

    `name` must be new in the store. Raises ConnectionError naming the ranks that did not come within `join_timeout_s`;
    afterwards a wait in the store that says no time ends after five minutes.
    """
    deadline_s = time.monotonic() + join_timeout_s
    launch = recognize()
    if launch is None:
        raise UsageError("this process is not of a job: no launcher's variables are set; start it with torchrun")
    place = ":".join(map(str, launch.store_address()))
    rank, size = launch.rank, launch.size
    try:
        store = launch.open_store(join_timeout_s)
        store.set(f"{name}/here/{rank}", "")
    except (UsageError, JobError):
        raise
    except (RuntimeError, OSError) as error:  # HolmesError and torch's DistError are RuntimeErrors
        raise UnreachableError(
            f"rank {launch.rank} cannot meet the others at {place} (MASTER_ADDR:MASTER_PORT): {error}; "
            "check that rank 0 runs there, that the name resolves to it on this host, and that no firewall is between"
        ) from error
    if rank == 0:
        missing = [other for other in range(size) if not _is_there(store, f"{name}/here/{other}", deadline_s)]
        if missing:
            raise UnreachableError(
                f"of {size} ranks, {some(map(str, missing))} did not come "
                f"within {join_timeout_s:g} s; look at their output, and whether they reach {place}"
            )
        store.set(f"{name}/all", "")
    else:
        store.wait([f"{name}/all"], timedelta(seconds=join_timeout_s))
    yield JobStore(store, rank, size)
    store.set(f"{name}/done/{rank}", "")
    if rank == 0:
        deadline_s = time.monotonic() + _LEAVE_S  # for all: those that are gone never come
        for other in range(size):
            _is_there(store, f"{name}/done/{other}", deadline_s)


def _is_there(store: Any, key: str, deadline_s: float) -> bool:
    if hasattr(store, "check") and store.check([key]):  # torch's: a wait without time may not see what is there
        return True
    left_s = max(deadline_s - time.monotonic(), _PROBE_S)
    try:
        store.wait([key], timedelta(seconds=left_s))
    except RuntimeError:
        return False
    return True
