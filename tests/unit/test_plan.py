"""Plan: what it says, and that its file says the same."""

import dataclasses
import re
from pathlib import Path

import pytest
from topologies import topology_of, two_clusters

from holmes.cluster.topology import Topology
from holmes.planning.groups.rank_grid import KINDS
from holmes.planning.partition import PartitionProblem, Stage, best_partition, equal_layers
from holmes.planning.plan import Plan, plan_for
from holmes.planning.plan.workable import workable_plan


def test_plan_of_two_clusters() -> None:
    plan = plan_for(two_clusters(), model_layers=5, pipeline=2)
    assert (plan.tensor, plan.data, plan.pipeline, plan.layers_per_stage) == (1, 2, 2, (3, 2))
    assert [plan.stage_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert plan.layers_of(1) == range(3, 5)
    assert plan.group_of("dp", 3).ranks == (2, 3)
    assert "dp [2, 3]: 2: roce0, 3: roce0; best network that all 2 ranks share" in plan.describe()
    with pytest.raises(ValueError, match=r"no groups of kind 'xx'; kinds are dp_cp, dp, "):
        plan.group_of("xx", 1)
    with pytest.raises(ValueError, match="no 'dp' group of rank 9; ranks are 0 to 3"):
        plan.group_of("dp", 9)


def test_as_few_stages_as_fit_by_default() -> None:
    assert plan_for(two_clusters(ranks_per_host=2), model_layers=8, tensor=2).pipeline == 2
    with pytest.raises(ValueError, match=r"model_layers=4\.5 must be a whole number"):
        plan_for(two_clusters(), model_layers=4.5)


def test_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match=r"1 layers cannot fill 2 pipeline stages.* a model of at least 2 layers"):
        plan_for(two_clusters(), model_layers=1, pipeline=2)


def test_layers_per_stage_as_the_partition_found_them() -> None:
    problem = PartitionProblem(equal_layers(12), (Stage(2.0), Stage(1.0)))
    counts = best_partition(problem).layers_per_stage
    plan = plan_for(two_clusters(), model_layers=12, pipeline=2, layers_per_stage=counts)
    assert plan.layers_per_stage == (8, 4)
    assert plan.layers_of(1) == range(8, 12)
    with pytest.raises(ValueError, match=r"=\[8, 3\] \(2 stages, 11 layers\) must be 2 .* even split: \[6, 6\]"):
        plan_for(two_clusters(), model_layers=12, pipeline=2, layers_per_stage=[8, 3])


@pytest.mark.parametrize("suffix", ["yaml", "yml", "json"])
def test_saved_and_loaded(tmp_path: Path, suffix: str) -> None:
    topology = two_clusters(ranks_per_host=2)
    plan = plan_for(
        topology,
        model_layers=12,
        pipeline=4,
        tensor=2,
        micro_batch=2,
        global_batch=16,
        model={"hidden": 64},
        reasons=["chosen by hand"],
    )
    plan.save(tmp_path / f"plan.{suffix}")
    assert Plan.load(tmp_path / f"plan.{suffix}") == plan
    topology.save(tmp_path / f"topology.{suffix}")
    assert Topology.load(tmp_path / f"topology.{suffix}") == topology


def test_interleaved_layers() -> None:
    topology = two_clusters()
    plan = plan_for(topology, model_layers=9, pipeline=2, chunks=2)
    assert (plan.schedule, plan.chunks) == ("interleaved", 2)
    assert (plan.layers_per_chunk, plan.layers_per_stage) == (((3, 2), (2, 2)), (5, 4))
    assert [plan.layers_of(stage, chunk) for chunk in (0, 1) for stage in (0, 1)] == [
        range(3),
        range(3, 5),
        range(5, 7),
        range(7, 9),
    ]
    with pytest.raises(ValueError, match="each stage has 2 chunks; say which one, 0 to 1"):
        plan.layers_of(0)
    given = plan_for(topology, model_layers=9, pipeline=2, layers_per_chunk=[[1, 2], [4, 2]])
    assert (given.chunks, given.layers_of(1, 0), given.layers_of(0, 1)) == (2, range(1, 5), range(5, 7))
    with pytest.raises(
        ValueError, match=r"layers_per_chunk=\[\[1, 2\], \[4, 3\]\] .* must be 2 times 2 numbers, .*=9; for"
    ):
        plan_for(topology, model_layers=9, pipeline=2, layers_per_chunk=[[1, 2], [4, 3]])
    with pytest.raises(ValueError, match="chunks=2 needs schedule='interleaved', but it is 'gpipe'"):
        plan_for(topology, model_layers=9, pipeline=2, chunks=2, schedule="gpipe")
    with pytest.raises(ValueError, match=r"schedule='pipedream' is unknown; .*'zb-h1'\]"):
        plan_for(topology, model_layers=9, pipeline=2, schedule="pipedream")


@pytest.mark.parametrize(
    ("micro_batches", "near"), [(1, 1), (2, 2), (7, 7), (8, 8), (9, 8), (10, 10), (11, 10), (13, 12)]
)
def test_zero_bubble_takes_what_its_rounds_divide(micro_batches: int, near: int) -> None:
    topology = topology_of([[1] * 4])
    options = {"model_layers": 8, "pipeline": 4, "schedule": "zb-h1", "micro_batch": 2}
    assert plan_for(topology, **options, global_batch=2 * near).micro_batches == near
    if near != micro_batches:
        with pytest.raises(
            ValueError, match=rf"is {micro_batches} micro-batches, but .*nearest is global_batch={2 * near}"
        ):
            plan_for(topology, **options, global_batch=2 * micro_batches)
        changed = workable_plan(topology, **options, global_batch=2 * micro_batches)
        assert (changed.schedule, changed.pipeline, changed.global_batch) == ("zb-h1", 4, 2 * near)


def test_groups_of_a_rank() -> None:
    plan = plan_for(two_clusters(ranks_per_host=2), model_layers=8, pipeline=4)
    assert [group.kind for group in plan.groups_of(2)] == [kind for kind in KINDS if kind not in ("embd", "pos_embd")]
    assert plan.group_of("embd", 0).ranks == (0, 6)
    with pytest.raises(
        ValueError, match="rank 2 is in no 'embd' group: those hold the first and last stage of 4, and it"
    ):
        plan.group_of("embd", 2)
    group = plan.group_of("mp", 0)
    assert group.cluster_of == {0: "cluster 0", 2: "cluster 0", 4: "cluster 1", 6: "cluster 1"}
    assert group.cluster_nics == {0: ("ib0",), 2: ("ib0",), 4: ("roce0",), 6: ("roce0",)}


def test_the_file_stays_short_with_many_ranks(tmp_path: Path) -> None:
    topology = topology_of([[8] * 200, [8] * 300], rails=4)
    plan = plan_for(topology, model_layers=64, tensor=8, context=2, expert=4, expert_tensor=1)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert (tmp_path / "plan.json").stat().st_size < 100 * len(topology.hosts)
    assert plan.group_of("dp", 2345).nics[2345] == ("nic1_0", "nic1_1", "nic1_2", "nic1_3")
    assert len(plan.describe()) < 10_000


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    plan = plan_for(two_clusters(), model_layers=4)
    with pytest.raises(ValueError, match=r"must end in one of \.yaml, \.yml, \.json"):
        plan.save(tmp_path / "plan.txt")
    two_clusters().save(tmp_path / "topology.yaml")
    with pytest.raises(ValueError, match="expected a 'holmes plan' file, but it says kind: 'holmes topology'"):
        Plan.load(tmp_path / "topology.yaml")
    with pytest.raises(ValueError, match="holmes plan version 2 is unknown; this release reads version 3"):
        Plan.from_dict({**plan.to_dict(), "version": 2})
    networks = [{**network, "nics": {"ib0": "0-4"}} for network in plan.to_dict()["networks"]]
    with pytest.raises(ValueError, match=r"network 'infiniband 10\..* names host 4, but the plan has hosts 0 to 3"):
        Plan.from_dict({**plan.to_dict(), "networks": networks})
    with pytest.raises(ValueError, match=r"not a plan: .*colour"):
        Plan.from_dict({**plan.to_dict(), "colour": "red"})
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json cannot be read as json"):
        Plan.load(tmp_path / "broken.json")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ValueError, match="must hold a mapping, but holds list"):
        Plan.load(tmp_path / "list.yaml")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"order": None}, "not a plan: order is None; it must be numbers such as 0-7,16-30:2"),
        ({"tensor": "x"}, "not a plan: tensor is 'x'; it must be a whole number of 1 or more"),
        ({"data": 2.0}, "not a plan: data is 2.0; it must be a whole number"),
        ({"hosts": [{"name": "a"}]}, "not a plan: hosts[0].ranks is missing; it must be numbers"),
        ({"layers_per_chunk": [[4, "x"]]}, "not a plan: layers_per_chunk[0] is [4, 'x']; it must be a list"),
        ({"networks": [{"name": "n", "speed": 1}]}, "not a plan: networks[0] has an unknown key 'speed'"),
        ({"model": 7}, "not a plan: model is 7; it must be a mapping"),
        ({"reasons": 7}, "not a plan: reasons is 7; it must be a list"),
        ({"micro_batch": 1.5}, "micro_batch=1.5 must be a whole number of at least 1"),
        ({"global_batch": 7}, "global_batch=7 must be a multiple of data=4 = 4; the nearest is global_batch=8"),
        (
            {"global_batch": 8, "micro_batch": 3},
            "global_batch=8 must be a multiple of data=4 * micro_batch=3 = 12; the nearest is global_batch=12",
        ),
    ],
)
def test_a_field_of_a_plan_that_is_wrong(changes: dict, words: str) -> None:
    data = plan_for(two_clusters(), model_layers=4, pipeline=1, span_clusters=True).to_dict()
    with pytest.raises(ValueError, match=re.escape(words)):
        Plan.from_dict({**data, **changes})
    del data["order"]
    with pytest.raises(ValueError, match="not a plan: order is missing; it must be numbers"):
        Plan.from_dict(data)


def test_a_plan_that_contradicts_itself() -> None:
    plan = plan_for(two_clusters(), model_layers=4)
    with pytest.raises(
        ValueError, match=r"tensor=1 \* context=1 \* data=2 \* pipeline=3 = 6, but the plan has 4 ranks"
    ):
        dataclasses.replace(plan, pipeline=3)
    with pytest.raises(ValueError, match=r"layers_per_chunk=\[\[4\]\] must have pipeline=2 entries"):
        dataclasses.replace(plan, layers_per_chunk=((4,),))
    with pytest.raises(ValueError, match=r"order must hold each of 4 ranks once, but holds \[0, 1, 2, 2\]"):
        dataclasses.replace(plan, order=(0, 1, 2, 2))


def test_planning_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, holmes, holmes.cluster.probe; holmes.plan, holmes.plan_for; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
