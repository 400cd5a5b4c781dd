"""A job's meeting place for command-line tools: torch's store by torchrun's variables, with a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from holmes.cluster.topology.contradictions import some
from holmes_comm.errors import UnreachableError, UsageError

_LEAVE_S = 10.0


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
    deadline_s = time.monotonic() + join_timeout_s
    try:
        store, rank, size = _meet(timedelta(seconds=join_timeout_s))
        store.set(f"{name}/here/{rank}", "")
    except UsageError:
        raise
    except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UnreachableError(
            f"rank {os.environ.get('RANK')} cannot meet the others at {place} (MASTER_ADDR:MASTER_PORT): {error}; "
            "check that rank 0 runs there, that the name resolves to it on this host, and that no firewall is between"
        ) from error
    if rank == 0:
        missing = [other for other in range(size) if not _is_there(store, f"{name}/here/{other}", deadline_s)]
        if missing:
            raise UnreachableError(
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
        deadline_s = time.monotonic() + _LEAVE_S  # for all: those that are gone never come
        for other in range(size):
            _is_there(store, f"{name}/done/{other}", deadline_s)


def _meet(timeout: timedelta) -> tuple[Any, int, int]:
    """The store, rank and size. As torch's rendezvous does, without its wait for all, which cannot tell who misses."""
    from torch.distributed import PrefixStore, TCPStore

    try:
        rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        address = os.environ["MASTER_ADDR"]
    except KeyError as error:
        raise UsageError(f"WORLD_SIZE is set, but not {error.args[0]}; start the job with torchrun") from None
    except ValueError as error:
        raise UsageError(f"RANK, WORLD_SIZE and MASTER_PORT must be numbers: {error}") from None
    if not 0 <= rank < size:
        raise UsageError(
            f"RANK={rank} is none of WORLD_SIZE={size}'s ranks, 0 to {size - 1}; start the job with torchrun"
        )
    served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not served_by_torchrun
    store = TCPStore(address, port, is_master=serves, timeout=timeout, wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"/worker/attempt_{attempt}", store), rank, size


def _is_there(store: Any, key: str, deadline_s: float) -> bool:
    left_s = max(deadline_s - time.monotonic(), 0.001)
    try:
        store.wait([key], timedelta(seconds=left_s))
    except RuntimeError:
        return False
    return True
