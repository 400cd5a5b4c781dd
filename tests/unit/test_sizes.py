"""Parallel sizes on random machines: whatever fits is proven, whatever does not gets one error whose fix works."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topologies import topology_of

import holmes
from holmes.cluster.topology import Topology
from holmes.planning.groups.sizes import Limits, Sizes, divisors, nearest, possible_pipelines, problems
from holmes.words import from_text

hosts = st.lists(st.lists(st.sampled_from([1, 2, 4, 6, 8]), min_size=2, max_size=4), min_size=1, max_size=3)
wanted_sizes = st.builds(
    Sizes,
    tensor=st.integers(0, 6),
    context=st.sampled_from([1, 1, 2, 3, 4]),
    pipeline=st.integers(0, 9),
    expert=st.sampled_from([1, 1, 2, 3, 4]),
    expert_tensor=st.sampled_from([None, None, 1, 2, 3]),
    chunks=st.integers(1, 2),
)


def plan_of(topology: Topology, sizes: Sizes, model_layers: int) -> holmes.Plan:
    return holmes.plan_for(topology, model_layers=model_layers, **vars(sizes))


def check_plan(plan: holmes.Plan, topology: Topology) -> None:
    """The proof, and the same by plain loops that share no code with it."""
    proof = holmes.check(plan, topology)
    assert proof.holds, proof.describe()
    host = {rank: host.name for host in topology.hosts for rank in host.ranks}
    cluster = {rank: cluster.name for cluster in topology.clusters for rank in cluster.ranks}
    for kind in ("tp", "expt_tp"):
        assert all(len({host[rank] for rank in group.ranks}) == 1 for group in plan.groups(kind))
    for kind in ("cp", "dp", "dp_cp", "tp_dp_cp", "ep", "tp_ep", "expt_dp"):
        for group in plan.groups(kind):
            assert len({cluster[rank] for rank in group.ranks}) == 1
            if len({host[rank] for rank in group.ranks}) > 1:
                name = cluster[group.ranks[0]]
                assert group.nic_class == next(c.nic_class for c in topology.clusters if c.name == name)
                assert set(group.nics) == set(group.ranks)


@settings(max_examples=150, deadline=None)
@given(hosts, wanted_sizes, st.integers(1, 40), st.randoms(use_true_random=False))
def test_sizes_fit_or_the_fix_does(counts: list[list[int]], sizes: Sizes, layers: int, shuffle: random.Random) -> None:
    topology = topology_of(counts, shuffle)
    limits = Limits.of(topology, layers)
    if not problems(limits, sizes):
        check_plan(plan_of(topology, sizes, layers), topology)
        return
    with pytest.raises(ValueError, match="does not fit: ") as caught:
        plan_of(topology, sizes, layers)
    near = nearest(limits, sizes)
    message = str(caught.value)
    if near is None:
        needed = int(re.search(r"Fix: a model of at least (\d+) layers", message)[1])  # type: ignore[index]
        assert needed > layers
        assert nearest(Limits.of(topology, needed), sizes) is not None
        return
    assert f"the nearest sizes that fit: {near.text()}" in message
    check_plan(plan_of(topology, near, layers), topology)


@settings(max_examples=60, deadline=None)
@given(hosts, wanted_sizes)
def test_ranks_to_leave_out_are_enough(counts: list[list[int]], sizes: Sizes) -> None:
    topology = topology_of(counts)
    try:
        plan_of(topology, sizes, 1000)
    except ValueError as error:
        found = re.search(r"leave out ranks (.*): stages of", str(error))
        if found is None:
            return
        out = {rank for piece in re.findall(r"[\d,:-]+(?= of)", found[1]) for rank in from_text(piece)}
        kept = [
            [sum(rank not in out for rank in host.ranks) for host in topology.hosts if host.name in cluster.hosts]
            for cluster in topology.clusters
        ]
        left = [[count for count in cluster if count] for cluster in kept]
        if min(map(len, left)) > 1:  # a cluster of one host is none
            check_plan(plan_of(topology_of(left), sizes, 1000), topology_of(left))


def test_context_groups_stay_on_hosts_where_they_fit() -> None:
    topology = topology_of([[8, 4, 8, 4]], random.Random(3))
    plan = holmes.plan_for(topology, model_layers=8, tensor=2, context=4)
    host = {rank: host.name for host in topology.hosts for rank in host.ranks}
    spread = Counter(len({host[rank] for rank in ranks}) for ranks in plan.grid.groups("tp_cp").tolist())
    assert spread == {1: 2, 2: 1}


def test_stages_over_clusters_of_different_size_in_a_chosen_order() -> None:
    topology = topology_of([[4, 4, 4, 4], [4, 4]], random.Random(1))
    assert possible_pipelines(topology, Sizes(tensor=4)) == [3, 6]
    names = [cluster.name for cluster in topology.clusters]
    sizes = {cluster.name: len(cluster.ranks) // 8 for cluster in topology.clusters}
    for order in (names, names[::-1]):
        plan = holmes.plan_for(topology, model_layers=9, tensor=4, pipeline=3, cluster_order=order)
        home = {rank: cluster.name for cluster in topology.clusters for rank in cluster.ranks}
        stages = [home[plan.ranks_of_stage(stage)[0]] for stage in range(3)]
        assert stages == [name for name in order for _ in range(sizes[name])]
    with pytest.raises(ValueError, match=r"cluster_order=\['a'\] must name each cluster once; .*'cluster 0', 'clus"):
        holmes.plan_for(topology, model_layers=9, cluster_order=["a"])


def test_one_error_holds_everything() -> None:
    topology = topology_of([[8, 8], [8, 8, 8, 8]])
    with pytest.raises(ValueError, match="does not fit") as caught:
        holmes.plan_for(
            topology, model_layers=4, tensor=3, context=5, pipeline=6, expert=7, micro_batch=2, global_batch=100
        )
    message = str(caught.value)
    for part in (
        "tensor=3 must divide the ranks of every host (6 times 8)",
        "4 layers cannot fill 6 pipeline stages",
        "tensor=3 * context=5 = 15 must divide a stage of 8 ranks",
        "expert_tensor=3 * expert=7 = 21 must divide a stage of 8 ranks",
        "the nearest sizes that fit: tensor=2, context=4, pipeline=3, expert=8",
    ):
        assert part in message, message


def test_batches() -> None:
    topology = topology_of([[4, 4], [4, 4]])
    plan = holmes.plan_for(topology, model_layers=8, pipeline=2, micro_batch=2, global_batch=64)
    assert (plan.data, plan.micro_batches) == (8, 4)
    with pytest.raises(ValueError, match=r"global_batch=60 .* data=8 \* micro_batch=2 = 16. Fix: global_batch=64"):
        holmes.plan_for(topology, model_layers=8, pipeline=2, micro_batch=2, global_batch=60)
    with pytest.raises(ValueError, match=r"data=8 \* micro_batch=1 \* pipeline=2 \(interleaved\) = 16. Fix: .*=32"):
        holmes.plan_for(topology, model_layers=8, pipeline=2, chunks=2, micro_batch=1, global_batch=24)
    with pytest.raises(ValueError, match=r"nearest sizes that fit: tensor=1, pipeline=2 .*, with global_batch=16"):
        holmes.plan_for(topology, model_layers=8, pipeline=1, micro_batch=2, global_batch=7)


def test_divisors() -> None:
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert divisors(1) == [1]
