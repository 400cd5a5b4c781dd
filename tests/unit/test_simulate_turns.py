"""Pipelines that take turns on what joins their stages: simulated, chosen, in plans and groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
from topologies import topology_of

import holmes
from holmes import files
from holmes.planning.schedule import MOST_TURNS
from holmes.planning.simulate import (
    Boundary,
    Framework,
    Job,
    LinkRate,
    Place,
    Rates,
    Route,
    Stage,
    Step,
    Transformer,
    best_schedule,
    chrome_trace,
    make_step,
    simulate,
)
from holmes_comm import GroupOptions
from holmes_comm.errors import UsageError

MODEL = Transformer(8, 512, 8, 128, 1000)


def shared(micro_batches: int = 1, pipelines: int = 2, stage: Stage | None = None, **options) -> Step:
    """Two stages of 1 s each way; a message of one pipeline takes 1 s of the link, which all of them share."""
    ways = [Route({way: float(pipelines)}) for way in ("down", "up")]
    stage = stage or Stage(1.0, 1.0)
    boundaries = (Boundary(*ways, 100.0),) * options.get("chunks", 1)
    return Step((stage,) * 2, boundaries, {"down": 100.0, "up": 100.0}, micro_batches, **options)


def test_the_first_pipeline_goes_at_the_full_rate_and_the_last_one_is_done_earlier_too() -> None:
    assert simulate(shared()).step_s == pytest.approx(1 + 2 + 1 + 1 + 2 + 1)
    found = simulate(shared(turns=2))
    # The first one's: F to 1, sent at 2, F and B to 4, sent at 5, B to 6. The last one's: sent at 3, F and B to 5,
    # sent at 6, B to 7.
    assert found.step_s == pytest.approx(7, rel=0.01)
    ends_s = {task.device: task.end_s for task in found.tasks if task.kind == "backward"}
    assert ends_s["stage 0, turn 0"] == pytest.approx(6, rel=0.01)
    assert ends_s["stage 0"] == pytest.approx(7, rel=0.01)
    assert len(found.devices) == 2
    assert found.devices[0].busy_s == pytest.approx(2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved"])
@pytest.mark.parametrize("turns", [2, 3, 4])
def test_as_many_bytes_cross_each_link(schedule: str, turns: int) -> None:
    stage = Stage(1.0, 2.0, reduce_bytes=50.0, gather_bytes=20.0, data_route=Route({"down": 3.0}))
    chunks = 2 if schedule == "interleaved" else 1
    step = shared(8, 4, stage, schedule=schedule, chunks=chunks)
    for overlap in (False, True):
        step = replace(step, overlap_reduce=overlap, overlap_gather=overlap, embedding=step.boundaries[0])
        plain, found = simulate(step), simulate(replace(step, turns=turns))
        assert found.link_bytes == pytest.approx(plain.link_bytes)
        assert found.step_s <= plain.step_s * 1.2
        reduces = [task for task in found.tasks if task.kind == "reduce"]
        last_s = max(task.end_s for task in found.tasks if task.kind in ("backward", "weights"))
        assert reduces
        assert len(reduces) == sum(task.kind == "reduce" for task in plain.tasks)
        assert max(task.end_s for task in reduces) > last_s  # of all pipelines
        assert {task.label for task in found.tasks} == {task.label for task in plain.tasks}


def test_a_link_that_is_no_limit_changes_nothing() -> None:
    step = replace(shared(6), links={"down": 1e9, "up": 1e9})
    assert simulate(replace(step, turns=2)).step_s == pytest.approx(simulate(step).step_s, rel=1e-4)


def test_the_trace_has_a_row_for_each_pipeline() -> None:
    names = {
        event["args"]["name"] for event in chrome_trace(simulate(shared(turns=2)))["traceEvents"] if event["ph"] == "M"
    }
    assert {"stage 0", "stage 0, turn 0", "stage 0 activations", "stage 0 activations, turn 0"} <= names


def test_they_are_chosen_where_they_are_faster_and_share_a_link() -> None:
    places = tuple(Place(f"host {i}", 1, 4, "none", "wan") for i in range(2))
    framework = Framework(recomputation="none", tied_embedding=False)
    job = Job(MODEL, (4, 4), places, framework, 1, 16)
    rates = Rates(1.0, {"wan": LinkRate(0.05)})
    best = best_schedule(job, rates, most=4, sharing=4)[0]
    assert best.turns == 4
    assert f", {best.turns} pipelines in turns" in best.text()
    assert (
        best.step_s
        == simulate(make_step(replace(job, turns=best.turns, schedule=best.schedule, warmup=best.warmup), rates)).step_s
    )
    alone = best_schedule(job, rates, most=4)[0]
    assert alone.turns is None
    assert best_schedule(job, replace(rates, links={"wan": LinkRate(100.0)}), most=4, sharing=4)[0].turns is None
    assert best.step_s < 0.9 * alone.step_s
    # Of two it is less than a tenth, and no reason.
    assert best_schedule(job, rates, most=4, sharing=2)[0].turns is None


def _plan(**options):
    topology = topology_of([[2, 2], [2, 2]])
    return holmes.plan_for(topology, model_layers=8, pipeline=2, **options)


def test_a_plan_tells_its_pipelines_their_turns(tmp_path) -> None:
    plan = _plan(turns=3)
    assert [group.turn for group in plan.groups("pp")] == [0, 1, 2, 0]
    assert {group.turn for kind in ("dp", "mp", "world") for group in plan.groups(kind)} == {None}
    assert {group.turn for group in _plan().groups("pp")} == {None}
    plan.save(tmp_path / "plan.yaml")
    assert holmes.Plan.load(tmp_path / "plan.yaml") == plan
    assert "turns" not in files.load(_saved(_plan(), tmp_path / "other.yaml"))
    assert "pipelines that take turns on what joins the clusters: 3" in plan.describe()
    assert "priority 3, turn 2" in plan.describe()


def _saved(plan, path):
    plan.save(path)
    return path


def test_all_groups_of_a_pipeline_have_its_turn() -> None:
    plan = _plan(turns=2, tensor=2)
    assert [group.turn for group in plan.groups("pp")] == [0, 0, 1, 1]


@pytest.mark.parametrize("turns", [1, 0, -2, 5, 2.0, True, "2"])
def test_no_such_turns(turns) -> None:
    with pytest.raises(UsageError, match=r"turns=.* must be a whole number from 2 to 4, of the pipelines"):
        _plan(turns=turns)


def test_a_group_can_be_told_as_many_turns_as_a_plan() -> None:
    assert GroupOptions(priority=3, turn=MOST_TURNS - 1).turn == MOST_TURNS - 1
    with pytest.raises(UsageError, match=f"turn={MOST_TURNS} is not possible"):
        GroupOptions(priority=3, turn=MOST_TURNS)


def test_turns_without_stages_or_of_one_pipeline() -> None:
    topology = topology_of([[1, 1], [1, 1]])
    with pytest.raises(
        UsageError, match=r"turns=2 is of two pipelines or more that have stages, but there are 4 stages"
    ):
        holmes.plan_for(topology, model_layers=8, pipeline=4, turns=2)
    with pytest.raises(UsageError, match="there are 1 stages"):
        replace(shared(), stages=(Stage(1.0, 1.0),), boundaries=(), turns=2)
