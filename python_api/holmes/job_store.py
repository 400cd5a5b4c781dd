"""A job's meeting place for command-line tools: torch's rendezvous by torchrun's variables, with a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from holmes.topology.contradictions import some


@dataclass(frozen=True)
class JobStore:
    """A torch.distributed store, and this process's place in the job."""

    store: Any
    rank: int
    size: int


def in_job() -> bool:
    """Whether a launcher started this process as one of a job."""
    return "WORLD_SIZE" in os.environ


@contextmanager
def join_job(name: str, join_timeout_s: float, timeout_s: float = 300.0) -> Iterator[JobStore]:
    """Collective. Meets the other ranks, and leaves together: rank 0 may serve the store, so it goes last.

    `name` must be new in the store. Raises ConnectionError naming the ranks that did not come within `join_timeout_s`;
    afterwards a wait in the store ends after `timeout_s`.
    """
    from torch.distributed.rendezvous import rendezvous

    deadline_s = time.monotonic() + join_timeout_s
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=join_timeout_s)))
        store.set(f"{name}/here/{rank}", "")
    except (RuntimeError, OSError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConnectionError(
            f"rank {os.environ.get('RANK')} cannot meet the others at {place} (MASTER_ADDR:MASTER_PORT): {error}; "
            "check that rank 0 runs there, that the name resolves to it on this host, and that no firewall is between"
        ) from error
    if rank == 0:
        missing = [other for other in range(size) if not _is_there(store, f"{name}/here/{other}", deadline_s)]
        if missing:
            raise ConnectionError(
                f"of {size} ranks, {some(map(str, missing))} did not come "
                f"within {join_timeout_s:g} s; look at their output, and whether they reach "
                f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            )
        store.set(f"{name}/all", "")
    else:
        store.wait([f"{name}/all"], timedelta(seconds=join_timeout_s))
    store.set_timeout(timedelta(seconds=timeout_s))
    yield JobStore(store, rank, size)
    store.set(f"{name}/done/{rank}", "")
    if rank == 0:
        for other in range(size):
            _is_there(store, f"{name}/done/{other}", time.monotonic() + join_timeout_s)


def _is_there(store: Any, key: str, deadline_s: float) -> bool:
    left_s = max(deadline_s - time.monotonic(), 0.001)
    try:
        store.wait([key], timedelta(seconds=left_s))
    except RuntimeError:
        return False
    return True
