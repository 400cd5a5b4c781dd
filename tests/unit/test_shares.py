"""Uneven data-parallel shares: the plan's field, its apportionment by speed, its file, and trainers."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from topologies import topology_of, two_clusters
from typer.testing import CliRunner

import holmes
from holmes.cluster.topology import Topology
from holmes.planning.groups.shares import check_shares, shares_by_speed
from holmes.planning.partition.problem import split_evenly
from holmes.planning.plan.workable import workable_plan
from holmes.tools.cli import load
from holmes.training.integrations import (
    NotExpressible,
    deepspeed_partition,
    flagscale_config,
    megatron_arguments,
    renumbered,
    torchtitan_parallelism,
)


def with_speeds(topology: Topology, *tflops: float | None) -> Topology:
    """Hosts' GPUs reach these, in the order of the hosts."""
    hosts = [dataclasses.replace(host, gpu_tflops=each) for host, each in zip(topology.hosts, tflops, strict=True)]
    return dataclasses.replace(topology, hosts=tuple(hosts))


FAST_AND_SLOW = with_speeds(two_clusters(), 300.0, 300.0, 100.0, 100.0)


def make(topology: Topology = FAST_AND_SLOW, **options) -> holmes.Plan:
    sizes = {"model_layers": 4, "pipeline": 1, "span_clusters": True, "micro_batch": 2, "global_batch": 16}
    return holmes.plan_for(topology, **(sizes | options))


def test_a_plan_tells_each_rank_its_share() -> None:
    plan = make(data_shares=[3, 2, 2, 1])
    assert plan.data_shares == (3, 2, 2, 1)
    assert [plan.micro_batches_of(rank) for rank in range(4)] == [3, 2, 2, 1]
    assert [plan.gradient_weight(rank) for rank in range(4)] == [1.5, 1.0, 1.0, 0.5]
    assert [plan.samples_of(rank) for rank in range(4)] == [range(6), range(6, 10), range(10, 14), range(14, 16)]
    assert plan.describe().splitlines()[0].endswith("micro-batches of each replica [3, 2, 2, 1]")
    with pytest.raises(ValueError, match=r"data_shares=\[3, 2, 2, 1\]: replicas run .* plan\.micro_batches_of\(rank\)"):
        _ = plan.micro_batches
    for ask in (plan.micro_batches_of, plan.gradient_weight, plan.samples_of):
        with pytest.raises(ValueError, match="the plan has no rank 4; its ranks are 0 to 3"):
            ask(4)


def test_equal_shares_are_as_without() -> None:
    for plan in (make(), make(data_shares=[2, 2, 2, 2])):
        assert plan.micro_batches == plan.micro_batches_of(3) == 2
        assert plan.gradient_weight(3) == 1.0
        assert plan.samples_of(3) == range(12, 16)
        assert not plan.has_uneven_shares
        assert megatron_arguments(plan)
    assert make(micro_batch=None, global_batch=None).micro_batches_of(0) is None
    with pytest.raises(ValueError, match=r"does not say its global_batch; plan_for\(global_batch"):
        make(micro_batch=None, global_batch=None).samples_of(0)


def test_the_batch_need_not_divide_by_the_replicas() -> None:
    with pytest.raises(ValueError, match="must be a multiple of data=4"):
        make(global_batch=14)
    assert make(global_batch=14, data_shares=[3, 2, 1, 1]).micro_batches_of(0) == 3


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([3, 3, 1, 2], "sums to 9 micro-batches, but global_batch=16 of micro_batch=2 is 8; give shares that sum to 8"),
        ([4, 4, 0, 0], "must be data=4 whole numbers of at least 1, one for each replica"),
        ([5, 5, -1, -1], "must be data=4 whole numbers"),
        ([4, 4], r"data_shares=\[4, 4\] must be data=4 whole numbers"),
        ([2, 2, 2, 1, 1], "must be data=4 whole numbers"),
        ([], "must be data=4 whole numbers"),
        ([True, 3, 3, 1], r"data_shares=\[True, 3, 3, 1\] must be data=4 whole"),
        ([3.0, 3, 1, 1], r"data_shares=\[3\.0, 3, 1, 1\] must be"),
        (["3", 3, 1, 1], r"data_shares=\['3', 3, 1, 1\] must be"),
        ([None, 3, 1, 1], "must be data=4 whole numbers"),
        ("fast", "data_shares='fast' must be 'speed', or the micro-batches of each replica"),
        (8, "data_shares=8 must be 'speed', or"),
        (2.5, r"data_shares=2\.5 must be 'speed', or"),
        ({0: 4}, "must be 'speed', or"),
        (np.array([3, 3, 1, 1]), r"data_shares=array\(\[3, 3, 1, 1\]\) must be 'speed', or"),
        (list(np.array([3, 3, 1, 1])), "must be data=4 whole numbers"),
    ],
)
def test_wrong_shares_name_value_rule_and_fix(shares, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(data_shares=shares)


@pytest.mark.parametrize("shares", [[3, 2, 2, 1], "speed"])
def test_shares_need_both_batches(shares) -> None:
    for missing in ({"micro_batch": None}, {"global_batch": None}):
        with pytest.raises(ValueError, match=r"data_shares needs micro_batch and global_batch, but .* give both"):
            make(data_shares=shares, **missing)
    with pytest.raises(ValueError, match=r"global_batch=15 must be a multiple of micro_batch=2 .* global_batch=16"):
        make(data_shares=shares, global_batch=15)


def test_by_speed_needs_a_micro_batch_for_each_replica() -> None:
    with pytest.raises(
        ValueError, match=r"global_batch=6 .* at least data=4 times that; the nearest is global_batch=8"
    ):
        make(data_shares="speed", global_batch=6)


def test_each_replica_has_what_its_schedule_runs() -> None:
    topology = topology_of([[4], [4]])
    sizes = {"pipeline": 4, "model_layers": 8, "micro_batch": 1}
    chunks = {"chunks": 2, "schedule": "interleaved"}
    assert make(topology, **sizes, **chunks, global_batch=12, data_shares=[8, 4]).chunks == 2
    with pytest.raises(ValueError, match=r"replica 0 has 6 micro-batches, .*'interleaved' .*; multiples of 4 fit"):
        make(topology, **sizes, **chunks, global_batch=12, data_shares=[6, 6])
    with pytest.raises(ValueError, match=r"micro_batch_group=8 must divide the 12 micro-batches"):
        make(topology, **sizes, **chunks, global_batch=20, data_shares=[8, 12], micro_batch_group=8)
    assert make(topology, **sizes, **chunks, global_batch=24, data_shares=[8, 16], micro_batch_group=8)
    assert make(topology, **sizes, schedule="zb-h1", global_batch=12, data_shares=[10, 2]).schedule == "zb-h1"
    with pytest.raises(ValueError, match=r"replica 1 has 9 micro-batches, but schedule='zb-h1' with pipeline=4"):
        make(topology, **sizes, schedule="zb-h1", global_batch=12, data_shares=[3, 9])
    assert make(topology, **sizes, schedule="1f1b", global_batch=12, data_shares=[11, 1])  # any number


def test_replicas_that_exchange_tokens_have_equal_shares() -> None:
    topology = topology_of([[2, 2]])
    with pytest.raises(ValueError, match=r"expert=2 \* expert_tensor=1 ranks exchange tokens.*: leave data_shares out"):
        make(topology, expert=2, data_shares=[3, 2, 2, 1])
    inside = make(topology, tensor=2, expert=2, expert_tensor=1, data_shares=[6, 2])  # the tensor group's own experts
    assert inside.gradient_weight(0) == 1.5


@pytest.mark.parametrize("seed", range(5))
def test_ranks_in_any_order(seed: int) -> None:
    topology = topology_of([[2, 2], [2, 2]], random.Random(seed))
    plan = make(topology, tensor=2, data_shares=[4, 2, 1, 1])
    weights = {}
    for place, rank in enumerate(plan.order):
        assert plan.micro_batches_of(rank) == (4, 2, 1, 1)[place // 2]
        weights[rank] = plan.gradient_weight(rank)
    for group in plan.groups("dp"):
        assert sum(weights[rank] for rank in group.ranks) == pytest.approx(4)
    again = renumbered(plan)
    assert [again.gradient_weight(place) for place in range(8)] == [weights[rank] for rank in plan.order]
    staged = make(topology, tensor=1, pipeline=2, data_shares=[4, 2, 1, 1])
    for stage in range(2):
        assert [staged.micro_batches_of(rank) for rank in staged.ranks_of_stage(stage)] == [4, 2, 1, 1]


# --- by speed ---


@pytest.mark.parametrize("seed", range(40))
def test_by_speed_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    speeds = [rng.choice([0.3, 1.0, 1.0, 2.0, 3.7, 50.0]) for _ in range(rng.randint(1, 4))]
    unit, units = rng.choice([1, 1, 4]), rng.randint(len(speeds), 12)
    found = shares_by_speed(units * unit, speeds, unit)
    assert sum(found) == units * unit
    assert all(share >= unit and share % unit == 0 for share in found)

    def slowest(shares):
        return max(share / speed for share, speed in zip(shares, speeds, strict=True))

    every = itertools.product(range(1, units + 1), repeat=len(speeds))
    best = min(slowest([share * unit for share in shares]) for shares in every if sum(shares) == units)
    assert slowest(found) == best


def test_equal_speeds_give_the_most_even_shares() -> None:
    for total in range(5, 40):
        assert sorted(shares_by_speed(total, [2.0] * 5)) == sorted(split_evenly(total, 5))


def test_a_plan_by_speed_keeps_the_reason() -> None:
    plan = make(data_shares="speed")
    assert plan.data_shares == (3, 3, 1, 1)
    assert plan.reasons == (
        "micro-batches [3, 3, 1, 1] by the replicas' speeds [1, 1, 0.333, 0.333]: the slowest computes 0.5 of the time "
        "that it takes with equal shares",
    )
    names = dataclasses.replace(FAST_AND_SLOW, hosts=tuple(
        dataclasses.replace(host, gpu_tflops=None, gpu=gpu)
        for host, gpu in zip(FAST_AND_SLOW.hosts, ["NVIDIA H100 80GB HBM3"] * 2 + ["A100-80GB"] * 2, strict=True)
    ))  # fmt: skip
    assert make(names, data_shares="speed").data_shares == (3, 3, 1, 1)


def test_the_slowest_stage_of_a_replica_counts() -> None:
    # Stage 0 of both replicas lies in the fast cluster; replica 1's second stage is the slow one.
    topology = with_speeds(two_clusters(), 300.0, 300.0, 300.0, 100.0)
    assert make(topology, pipeline=2, data_shares="speed").data_shares == (6, 2)
    # With few layers there it is not: 300 / 6 and 100 / 2.
    assert make(topology, model_layers=8, pipeline=2, layers_per_stage=[6, 2], data_shares="speed").data_shares == (
        4,
        4,
    )


def test_by_speed_keeps_to_the_schedules_rounds() -> None:
    topology = with_speeds(two_clusters(), 300.0, 100.0, 300.0, 100.0)
    sizes = {"pipeline": 2, "micro_batch": 1, "data_shares": "speed"}
    chunks = {"chunks": 2, "schedule": "interleaved"}
    assert make(topology, **sizes, **chunks).data_shares == (12, 4)
    assert make(topology, **sizes, **chunks, micro_batch_group=4).data_shares == (12, 4)
    assert make(topology, **sizes, schedule="zb-h1", global_batch=14).data_shares == (12, 2)  # as good as (10, 4)
    with pytest.raises(ValueError, match=r"global_batch=15 .* \* 2 \(micro-batches .*; the nearest is global_batch=16"):
        make(topology, **sizes, **chunks, global_batch=15)


@pytest.mark.parametrize("gpu", [None, "Abacus 3000"])
def test_unknown_speeds_name_the_host(gpu: str | None) -> None:
    topology = with_speeds(two_clusters(), 300.0, 300.0, 100.0, None)
    hosts = (*topology.hosts[:3], dataclasses.replace(topology.hosts[3], gpu=gpu))
    with pytest.raises(
        ValueError, match=rf"'speed' needs the speed of every GPU, but host n3 .* gpu={gpu!r}, .*\[6, 2\]"
    ):
        make(dataclasses.replace(topology, hosts=hosts), data_shares="speed")


# --- elastic ---


def test_a_workable_plan_shares_out_anew() -> None:
    three = with_speeds(topology_of([[1, 1, 1]]), 300.0, 300.0, 100.0)
    options = {"model_layers": 1, "pipeline": 1, "tensor": 2, "micro_batch": 2, "global_batch": 16}
    by_speed = workable_plan(three, **options, data_shares="speed")
    assert (by_speed.data_shares, by_speed.global_batch) == ((4, 3, 1), 16)
    told = workable_plan(three, **options, data_shares=[6, 2])
    assert told.data_shares is None
    assert (told.global_batch, len(told.reasons)) == (18, 1)


# --- the file ---


def test_the_file_has_them_where_they_are(tmp_path) -> None:
    plan = make(data_shares=[3, 3, 1, 1])
    for suffix in ("yaml", "json"):
        plan.save(tmp_path / f"plan.{suffix}")
        assert holmes.Plan.load(tmp_path / f"plan.{suffix}") == plan
    without = make().to_dict()
    assert "data_shares" not in without  # releases that do not know it read the file
    assert holmes.Plan.from_dict(without).data_shares is None
    shown = CliRunner().invoke(load("tools.cli.plan:app"), ["show", str(tmp_path / "plan.yaml")])
    assert "micro-batches of each replica [3, 3, 1, 1]" in " ".join(shown.output.split())
    make(data_shares="speed").save(tmp_path / "plan.yaml")
    told = CliRunner().invoke(load("tools.cli.plan:app"), ["explain", str(tmp_path / "plan.yaml")])
    text = " ".join(told.output.split())
    assert "micro-batches of each replica [3, 3, 1, 1] - micro-batches [3, 3, 1, 1] by the replicas' speeds" in text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (6, r"data_shares is 6; it must be a list with the micro-batches of each replica, such as \[6, 2\]"),
        ("3,3,1,1", "it must be a list with the micro-batches"),
        ("speed", "it must be a list with the micro-batches"),
        ([3, 3, 1, True], "it must be a list with the micro-batches"),
        ([3, 3, 1, 1.0], "it must be a list with the micro-batches"),
        ([3, 3, 2, 0], r"data_shares=\[3, 3, 2, 0\] must be data=4 whole numbers of at least 1"),
        ([3, 3, 1, 2], "sums to 9 micro-batches"),
        ([4, 4], "must be data=4 whole numbers"),
        ([], "must be data=4 whole numbers"),
    ],
)
def test_files_edited_by_hand(value, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        holmes.Plan.from_dict(make(data_shares=[3, 3, 1, 1]).to_dict() | {"data_shares": value})


def test_a_file_with_another_batch_or_size() -> None:
    data = make(data_shares=[3, 3, 1, 1]).to_dict()
    with pytest.raises(ValueError, match="sums to 8 micro-batches, but global_batch=32 of micro_batch=2 is 16"):
        holmes.Plan.from_dict(data | {"global_batch": 32})
    with pytest.raises(ValueError, match="needs micro_batch and global_batch"):
        holmes.Plan.from_dict(data | {"micro_batch": None})
    with pytest.raises(ValueError, match="must be data=2 whole numbers"):
        holmes.Plan.from_dict(data | {"data": 2, "tensor": 2})


# --- trainers ---


@pytest.mark.parametrize(
    ("arguments", "title"),
    [
        (megatron_arguments, "Megatron"),
        (deepspeed_partition, "DeepSpeed's pipeline"),
        (torchtitan_parallelism, "torchtitan"),
        (flagscale_config, "FlagScale"),
    ],
)
def test_trainers_that_cannot_say_it_refuse(arguments, title: str) -> None:
    with pytest.raises(
        NotExpressible, match=rf"data_shares are \[3, 3, 1, 1\], but {title} gives .*; leave data_shares"
    ):
        arguments(make(data_shares=[3, 3, 1, 1]))


def test_shares_of_many_replicas_are_quick() -> None:
    speeds = [1.0 + index % 7 for index in range(2000)]
    found = shares_by_speed(40_000, speeds)
    check_shares(found, 2000, global_batch=40_000, micro_batch=1)
