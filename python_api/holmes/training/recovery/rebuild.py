"""Process groups of a generation: made in the same processes, aborted without hanging, and gone without a trace."""

from __future__ import annotations

import contextlib
import gc
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d


def start_groups(store: dist.Store, rank: int, size: int, backend: str, timeout_s: float) -> None:
    """Collective over the `size` ranks of a generation. Makes the default group; `store` is new for each generation.

    Raises what the backend raises where a rank does not come.
    """
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s), group_name=""
    )


def abort_groups() -> None:
    """Local. Ends what any thread waits for in any process group, with an error. From any thread; never blocks long."""
    for group in list(distributed_c10d._world.pg_names):
        with contextlib.suppress(Exception):  # one that is being made or closed at this moment
            group.abort()


def drop_groups() -> None:
    """Local. Closes every process group, with connections and threads, so that new ones can be made.

    After a failure call `abort_groups` before. Without one, what was sent still arrives.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    else:  # making the default group failed half way
        distributed_c10d._update_default_pg(None)
        # Groups are named by this number, and other ranks may not have tried (pytorch resets it in destroy only).
        distributed_c10d._world.group_count = 0
    gc.collect()  # hooks and schedules are cycles that hold buffers and groups
