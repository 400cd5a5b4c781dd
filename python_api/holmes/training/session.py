"""Session: from a running torch.distributed job to a plan, in one collective call."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from holmes.cluster.probe import discover_topology
from holmes.cluster.topology import Topology
from holmes.planning.plan.plan import Plan, plan_for
from holmes_comm.errors import UsageError


def gather_topology(timeout_s: float = 3.0, measure_s: float = 1.0) -> Topology:
    """Collective over the default group: what all ranks discover, every fabric confirmed and measured; equal on all.

    `timeout_s` bounds one connection attempt, `measure_s` the tournaments of the measurement, which in all takes about
    twice that; 0 measures nothing (docs/topology.md). Raises UsageError before `init_process_group`.
    """
    if not dist.is_initialized():
        raise UsageError('no process group yet; call torch.distributed.init_process_group("holmes") first')
    store, rank = _get_default_store(), dist.get_rank()
    # Counted in the store: of processes that met later, one may have called this oftener than another.
    call = store.add(f"holmes/topology/calls/{rank}", 1)
    return discover_topology(store, rank, dist.get_world_size(), f"holmes/topology/{call}", timeout_s, measure_s)


def make_plan(*, model_layers: int, topology: Topology | None = None, **options: Any) -> Plan:
    """Collective over the default group (local when `topology` is given): discovers, checks who reaches whom, groups.

    `options` (pipeline, tensor, context, expert, ...) as in `plan_for`; without `pipeline` as few stages as fit the
    clusters. Equal on all ranks. Raises ValueError, with all numbers and the nearest fix, where sizes do not fit, and
    RuntimeError before `init_process_group`.
    """
    return plan_for(topology or gather_topology(), model_layers=model_layers, **options)
