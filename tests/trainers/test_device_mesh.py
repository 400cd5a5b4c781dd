"""A plan as torch's DeviceMesh: axes, order, NICs."""

import pytest
from plans import fake_job, make

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch_ranks import init, run_ranks

from holmes.cluster.topology import NodeInventory, Port, candidate_fabrics, make_topology, merge_hosts
from holmes.training.integrations import device_mesh, planned_nics


@pytest.mark.parametrize("sizes", [{"tensor": 2, "pipeline": 2}, {"context": 2, "pipeline": 2}, {"pipeline": 4}])
def test_axes_are_the_planned_groups(sizes):
    plan = make(**sizes)
    for rank in range(plan.world_size):
        with fake_job(rank, plan.world_size):
            mesh = device_mesh(plan, backend="fake")
            assert mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
            assert mesh.mesh.flatten().tolist() == list(plan.order)
            for axis in mesh.mesh_dim_names:
                group = mesh.get_group(axis)
                planned = plan.group_of(axis, rank).ranks
                assert tuple(dist.get_process_group_ranks(group)) == planned
                assert mesh.get_local_rank(axis) == planned.index(rank)
                assert mesh[axis].mesh.tolist() == list(planned)


def on_loopback(order):
    """Two hosts of two ranks, in one cluster; the only NIC that all of this machine's ranks have is lo."""
    from holmes.planning.plan import plan_for

    port = Port("lo", "ethernet", "127.0.0.1", "127.0.0.0/8", 1.0)
    hosts = merge_hosts([NodeInventory(rank, f"n{i // 2}", f"id{i // 2}", (port,)) for i, rank in enumerate(order)])
    return plan_for(make_topology(hosts, candidate_fabrics(hosts)), model_layers=4, pipeline=2)


def shard(rank, size, store):
    from torch.distributed.fsdp import fully_shard

    from holmes_comm.torch_backend import nic_reason

    init(store, rank, size)
    plan = on_loopback([3, 0, 2, 1])
    mesh = device_mesh(plan)
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    whole = layer.weight.detach().clone()
    fully_shard(layer, mesh=mesh["dp"])
    assert torch.equal(layer.weight.full_tensor(), whole)  # shards come back in the mesh's order
    with planned_nics(plan):  # as a framework makes groups, without a word about NICs
        pipelines = [dist.new_group(list(group.ranks)) for group in plan.groups("pp")]
    other = dist.new_group([0, 1, 2])
    mine = next(group for group in pipelines if group is not dist.GroupMember.NON_GROUP_MEMBER)
    dist.all_reduce(torch.ones(1), group=mine)
    return nic_reason(mine), nic_reason(other) if rank < 3 else None


def test_fsdp_over_a_plan_and_groups_made_by_others():
    for reason, other in run_ranks(shard, 4):
        assert "the fastest network that all 2 ranks share" in reason  # lo, as planned
        assert other in (None, "loopback: all 3 ranks are on one host")  # not in the plan
