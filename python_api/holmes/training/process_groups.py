"""Plan -> torch.distributed process groups, each on its planned NICs."""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holmes.planning.groups.group import Group
from holmes.planning.groups.rank_grid import KINDS, check_kind
from holmes.planning.plan.plan import Plan
from holmes.words import count, short
from holmes_comm.errors import JobError, UsageError


class ProcessGroups(Mapping[str, dist.ProcessGroup]):
    """This rank's process groups by kind: `groups["dp"]` or `groups.dp`.

    Rank order in a group is the plan's: in `pp`, group rank = stage. A kind that was not asked for, or that this rank
    is not in (embedding groups hold the first and last stage only), is missing.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self._groups = dict(groups)

    def __getitem__(self, kind: str) -> dist.ProcessGroup:
        return self._groups[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __repr__(self) -> str:
        sizes = (f"{kind}: {count(group.size(), 'rank')}" for kind, group in self._groups.items())
        return f"<ProcessGroups {', '.join(sizes)}>"

    def __getattr__(self, kind: str) -> dist.ProcessGroup:
        if kind.startswith("_"):  # of a copy that has nothing yet, too
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {kind!r}")
        if kind not in self._groups:
            raise AttributeError(f"this rank has no process group of kind {kind!r}; it has {', '.join(self)}")
        return self._groups[kind]


#: What this rank's gradients count in the groups that plans made (`Plan.gradient_weight`), where shares are uneven.
_weights: weakref.WeakKeyDictionary[dist.ProcessGroup, float] = weakref.WeakKeyDictionary()


def planned_weight(group: dist.ProcessGroup | None) -> float:
    """What this rank's gradients count in the mean over `group`, by the plan whose `process_groups` made it; 1 where
    none did. Local."""
    return 1.0 if group is None else _weights.get(group, 1.0)


def process_groups(plan: Plan, backend: str = "holmes", kinds: Iterable[str] | None = None) -> ProcessGroups:
    """Collective over the default group. Creates all groups of these kinds, in the same order on every rank.

    `kinds`, such as ("dp", "pp") or `holmes.KINDS` for all: None: "tp", "dp" and "pp", with context parallelism "cp"
    and "dp_cp" too, with experts "ep", "expt_tp" and "expt_dp". Groups of one rank are made too, as Megatron does.
    Backend "holmes" puts each group on its planned NICs. In one that spans clusters, ranks of one cluster use its NICs
    with each other, and large collectives run hierarchically (docs/hierarchy.md); where there are stages it has the
    priority of its kind and the turn of its pipeline (docs/wan.md), unless the default group was told one. Any other
    backend (for comparison) chooses by itself. All else (deadline, TLS, secret, ...) is as the default group was told.
    Raises ValueError where the plan is for another number of ranks, or a kind does not exist.
    """
    if plan.world_size != (size := dist.get_world_size()):
        raise UsageError(f"the plan is for {plan.world_size} ranks, but this job has {size}; make a plan for this job")
    wanted = set(default_kinds(plan) if kinds is None else kinds)
    for kind in wanted:
        check_kind(kind)
    ordered = [kind for kind in KINDS if kind in wanted]
    rank = dist.get_rank()
    options = {**_keep_order(plan, ordered), "timeout": timeout_of(None)}
    mine: dict[str, dist.ProcessGroup] = {}
    for kind in ordered:
        groups = plan.groups(kind)
        row = plan.grid.row_of(kind, rank)
        for index, ranks in enumerate(groups.ranks):
            handle = dist.new_group(
                ranks.tolist(),
                backend=backend,
                pg_options=group_options(groups[index], rank) if backend == "holmes" and index == row else None,
                group_desc=f"{kind}{index}",
                **options,
            )
            if index == row:
                mine[kind] = handle
                if plan.has_uneven_shares and "dp" in KINDS[kind].axes:
                    _weights[handle] = plan.gradient_weight(rank)
    return ProcessGroups(mine)


def default_kinds(plan: Plan) -> list[str]:
    """The kinds of groups that a trainer with these sizes needs at least."""
    return [
        *("tp", "dp", "pp"),
        *(("cp", "dp_cp") if plan.context > 1 else ()),
        *(("ep", "expt_tp", "expt_dp") if plan.expert > 1 else ()),
    ]


def group_options(group: Group, rank: int) -> Any:
    """`pg_options` for `torch.distributed.new_group` with backend "holmes": the planned NICs of one rank, the group's
    priority unless the default group was told one, and what else the default group was told. Local."""
    from holmes_comm import GroupOptions, NicSelection, torch_backend

    try:
        told = torch_backend.group_options()
    except ValueError:  # there is none, or another backend made it
        told = GroupOptions()
    if told.priority is None:
        told = replace(told, priority=group.priority, turn=group.turn)
    transport = "rdma" if group.is_verbs_only else (told.nics or NicSelection.from_env()).transport

    def selection(names: tuple[str, ...]) -> NicSelection:
        return NicSelection(names=names, max_rails=max(len(names), 1), transport=transport)

    nics = selection(group.nics.get(rank, ()))
    if max(Counter(group.cluster_of.values()).values(), default=0) < 2:  # no two of its ranks have better ones
        return replace(told, nics=nics, cluster_nics=None)
    return replace(
        told,
        nics=nics,
        cluster=group.cluster_of[rank],
        cluster_nics=selection(group.cluster_nics[rank]),
        hierarchical_min_bytes=told.hierarchical_min_bytes if _has_large_collectives(group) else "never",
    )


def timeout_of(group: dist.ProcessGroup | None, device: torch.device | None = None) -> timedelta | None:
    """The time limit of a group's operations (None: the default group's) on `device` (None: the first that it serves);
    None where the backend does not say. Local."""
    asked: Any = group or dist.group.WORLD
    try:
        timeout: timedelta = asked._get_backend(device or asked._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):  # torch's fake one, MPI's, those written in Python
        return None
    return timeout


def _has_large_collectives(group: Group) -> bool:
    return KINDS[group.kind].within == "cluster" or group.kind == "world"


def _keep_order(plan: Plan, kinds: Iterable[str]) -> dict[str, Any]:
    """torch sorts the ranks of a group unless told not to, and older releases cannot be told."""
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        return {"sort_ranks": False}
    for kind in kinds:
        ranks = plan.groups(kind).ranks
        unsorted = (ranks[:, 1:] < ranks[:, :-1]).any(axis=1)
        if unsorted.any():
            raise JobError(
                f"the plan needs group {short(ranks[int(unsorted.argmax())].tolist())} in this order, but this torch "
                "sorts ranks; use a torch whose new_group has sort_ranks (2.13 has), or start ranks cluster by cluster"
            )
    return {}
