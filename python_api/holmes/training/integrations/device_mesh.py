"""A Plan as torch's DeviceMesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holmes.planning.plan.plan import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp", "cp", "tp")  # outermost first: the order in which a plan numbers its ranks


def device_mesh(plan: Plan, device_type: str = "cpu", backend: str = "holmes") -> DeviceMesh:
    """A mesh with axes "pp", "dp", "cp", "tp" whose groups are the plan's, each on its NICs. Collective over all ranks.

    `mesh["dp"]` goes into `fully_shard`, `mesh["tp"]` into `parallelize_module`, `mesh.get_group("pp")` into a pipeline
    stage. Raises ValueError where the plan is for another number of ranks.
    """
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from holmes.training.process_groups import process_groups

    groups = process_groups(plan, backend, AXES)
    ranks = torch.tensor(plan.order, dtype=torch.int).reshape(plan.pipeline, plan.data, plan.context, plan.tensor)
    return DeviceMesh.from_group([groups[axis] for axis in AXES], device_type, ranks, mesh_dim_names=AXES)
