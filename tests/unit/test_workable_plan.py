"""holmes.workable_plan: the sizes asked for where they fit, else the nearest that do, with the reason."""

import pytest
from topologies import assumed, hosts_of, ib, roce, two_clusters

from holmes import plan_for, workable_plan

LOST_ONE = assumed(hosts_of(ib(1), roce(3), roce(4)))
ONE_CLUSTER = assumed(hosts_of(ib(1), ib(2), ib(3)))


def test_what_fits_is_taken_as_it_is() -> None:
    topology = two_clusters()
    assert workable_plan(topology, model_layers=24, pipeline=2) == plan_for(topology, model_layers=24, pipeline=2)


def test_a_lost_host_changes_the_stages() -> None:
    plan = workable_plan(LOST_ONE, model_layers=24, pipeline=2, layers_per_stage=[16, 8], global_batch=8)
    assert (plan.pipeline, plan.data, plan.layers_per_stage, plan.global_batch) == (3, 1, (8, 8, 8), 8)
    (reason,) = plan.reasons
    assert "pipeline=3 instead of what was asked for" in reason
    assert "3 ranks / pipeline=2 is not a whole number" in reason


@pytest.mark.parametrize(
    ("batch", "pipeline", "data", "kept"),
    [(12, 1, 3, 12), (8, 3, 1, 8)],  # 8 does not divide by 3 ranks: three stages keep it
)
def test_the_batch_is_kept_where_some_sizes_allow(batch: int, pipeline: int, data: int, kept: int) -> None:
    plan = workable_plan(ONE_CLUSTER, model_layers=24, pipeline=1, global_batch=batch)
    assert (plan.pipeline, plan.data, plan.global_batch) == (pipeline, data, kept)


def test_else_the_nearest_batch_is_taken() -> None:
    plan = workable_plan(ONE_CLUSTER, model_layers=2, pipeline=1, global_batch=8)  # too few layers for three stages
    assert (plan.pipeline, plan.data, plan.global_batch) == (1, 3, 9)
    assert "global_batch=9" in plan.reasons[0]


def test_tensor_sizes_follow_the_hosts() -> None:
    topology = assumed(hosts_of(ib(1), ib(2), ranks_per_host=2))
    plan = workable_plan(topology, model_layers=24, pipeline=1, tensor=4)
    assert plan.tensor == 2


def test_stages_span_clusters_where_nothing_else_fits() -> None:
    plan = workable_plan(LOST_ONE, model_layers=1, pipeline=1)
    assert (plan.pipeline, plan.data) == (1, 3)


def test_nothing_fits() -> None:
    with pytest.raises(ValueError, match="tensor=0 must be at least 1"):
        workable_plan(LOST_ONE, model_layers=0, tensor=0)
