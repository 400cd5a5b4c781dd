"""The plan's NICs for process groups that a framework makes by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holmes.plan import Plan


@contextmanager
def planned_nics(plan: Plan) -> Iterator[None]:
    """While it is open, a group of the "holmes" backend made without pg_options uses the plan's NICs for its ranks.

    Local; after `init_process_group`; open it on every rank, around everything that makes groups (a trainer's main
    function, where it makes some late). Groups that the plan does not have, such as pairs for send and receive, use the
    fastest NIC that their members share, or what HOLMES_NICS says.
    """
    import torch.distributed as dist

    from holmes_comm import NicSelection
    from holmes_comm.torch_backend import nics_chosen_by

    rank = dist.get_rank()
    mine = {frozenset(group.ranks): group for group in plan.groups_of(rank)}

    def choose(global_ranks: list[int]) -> NicSelection | None:
        group = mine.get(frozenset(global_ranks))
        return None if group is None else NicSelection(names=group.nics.get(rank, ()))

    with nics_chosen_by(choose):
        yield
