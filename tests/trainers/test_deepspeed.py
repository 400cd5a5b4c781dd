"""DeepSpeed's pipeline built from a plan: its grid, its groups, its stages."""

import pytest
from plans import fake_job, make

pytest.importorskip("torch")
pytest.importorskip("deepspeed", reason="needs deepspeed: make test-trainers", exc_type=ImportError)

import deepspeed
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

from holmes.training.integrations import (
    NotExpressible,
    deepspeed_partition,
    deepspeed_pipeline_module,
    deepspeed_topology,
)


@pytest.fixture(autouse=True)
def deepspeed_comm(monkeypatch):
    import deepspeed.comm.comm as comm

    monkeypatch.setenv("LOCAL_RANK", "0")
    # Not compiled for minutes on first use: DeepSpeed's own shared memory, which these tests do not need.
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
    yield
    comm.cdb = None


@pytest.mark.parametrize("sizes", [{"pipeline": 2}, {"pipeline": 4}, {"pipeline": 2, "tensor": 2}])
def test_topology_has_the_planned_groups(sizes):
    plan = make(**sizes)
    topology = deepspeed_topology(plan)
    for axis, kind in (("pipe", "pp"), ("data", "dp"), ("model", "tp")):
        assert sorted(topology.get_axis_comm_lists(axis)) == sorted(plan.grid.groups(kind).tolist()), axis
    for rank in range(plan.world_size):
        place = topology.get_coord(rank)
        assert place.pipe == plan.stage_of(rank)
        assert place.data == plan.group_of("dp", rank).ranks.index(rank)
        assert place.model == plan.group_of("tp", rank).ranks.index(rank)
        assert topology.get_rank(**place._asdict()) == rank


def test_pipeline_module_has_the_planned_stages():
    plan = make(pipeline=2, layers_per_stage=[5, 2])
    assert deepspeed_partition(plan) == [0, 6, 9]
    layers = [LayerSpec(nn.Linear, 2, 2) for _ in range(9)]
    for rank in range(plan.world_size):
        with fake_job(rank, plan.world_size):
            deepspeed.init_distributed(dist_backend="fake", dist_init_required=False)
            module = deepspeed_pipeline_module(plan, layers)
            stage = plan.stage_of(rank)
            assert (module._local_start, module._local_stop) == ((0, 6), (6, 9))[stage]
            assert len(list(module.parameters())) == 2 * (6, 3)[stage]
            grid = module.mpu()
            assert grid.get_pipe_parallel_rank() == stage
            for group, kind in ((grid.get_data_parallel_group(), "dp"), (grid.get_pipe_parallel_group(), "pp")):
                assert dist.get_process_group_ranks(group) == sorted(plan.group_of(kind, rank).ranks)  # torch sorts
    with pytest.raises(ValueError, match=r"the pipeline has 8 layers, but the plan's 7 with .* make 9"):
        deepspeed_pipeline_module(plan, layers[:8])


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"chunks": 2}, r"schedule is 'interleaved', but DeepSpeed's pipeline has '1f1b'"),
        ({"context": 2}, "the plan has context=2, but DeepSpeed's pipeline has no context parallelism"),
        ({"expert": 2}, "the plan has expert=2, but DeepSpeed's pipeline has no expert parallelism"),
    ],
)
def test_what_deepspeed_cannot_be_told(sizes, reason):
    plan = make(pipeline=2, **sizes)
    with pytest.raises(NotExpressible, match=reason):
        deepspeed_partition(plan)
    with pytest.raises(NotExpressible, match=reason):
        deepspeed_topology(plan)
