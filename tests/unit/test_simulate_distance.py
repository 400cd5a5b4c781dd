"""Schedules over a distance: warm-ups, and the choice of one."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from topologies import topology_of
from typer.testing import CliRunner

import holmes
from holmes import files
from holmes.cluster.topology import Topology
from holmes.planning.model.presets import load_model
from holmes.planning.schedule import in_flight
from holmes.planning.search import search
from holmes.planning.search.space import Wanted
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
    job_of_plan,
    make_step,
    operations,
    simulate,
)
from holmes.planning.simulate.best import choices_of
from holmes.tools.cli import load
from holmes.training.integrations.export import export_plan

MODEL = Transformer(8, 512, 8, 128, 1000)
GPT = load_model("gpt-3.6b")


def far(latency_s: float, micro_batches: int = 12, stages: int = 2, **options) -> Step:
    """Stages of 1 s forward and 2 s backward; messages without bytes take `latency_s` each way."""
    way = Route(latency_s=latency_s)
    boundaries = (Boundary(way, way),) * (stages if options.get("chunks", 1) > 1 else stages - 1)
    return Step((Stage(1.0, 2.0),) * stages, boundaries, {}, micro_batches, **options)


def far_job(latency_s: float, jitter_s: float = 0.0, gbps: float = 1.0, **options) -> tuple[Job, Rates]:
    places = tuple(Place(f"host {i}", 1, 1, "none", "wan") for i in range(2))
    framework = Framework(recomputation="none", tied_embedding=False)
    job = Job(MODEL, (4, 4), places, framework, 1, options.pop("global_batch", 16), **options)
    return job, Rates(1.0, {"wan": LinkRate(gbps, latency_s, jitter_s=jitter_s)})


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("warmup", [(4, 3, 2, 1), (9, 5, 4, 1), (16, 16, 16, 16), (1, 1, 1, 1), (40, 2, 2, 2)])
def test_a_warmup_is_the_forwards_before_the_first_backward(schedule: str, warmup: tuple[int, ...]) -> None:
    for stage in range(4):
        order = operations(schedule, 4, stage, 16, warmup=warmup)
        phases = [operation.phase for operation in order]
        assert phases.index("B") == min(warmup[stage], 16)
        held = most = 0
        for phase in phases:
            held += {"F": 1, "B": 0 if schedule == "zb-h1" else -1, "W": -1}[phase]
            most = max(most, held)
        assert most <= in_flight(schedule, 4, 1, 16, stage, warmup).max()
    assert simulate(far(0.0, 16, 4, schedule=schedule, warmup=warmup)).step_s > 0  # nothing waits in a circle


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_usual_warmup_is_the_schedule_itself(schedule: str) -> None:
    for stage in range(4):
        assert operations(schedule, 4, stage, 9, warmup=(4, 3, 2, 1)) == operations(schedule, 4, stage, 9)


def test_all_forwards_first_are_gpipe() -> None:
    assert operations("1f1b", 3, 1, 8, warmup=(8, 8, 8)) == operations("gpipe", 3, 1, 8)


@pytest.mark.parametrize(
    ("schedule", "warmup", "words"),
    [
        ("gpipe", (4, 4), "is of the schedules 1f1b and zb-h1, but it is 'gpipe'"),
        ("1f1b", (4,), "must be 2 whole numbers of at least 1"),
        ("1f1b", (4, 0), "must be 2 whole numbers of at least 1"),
        ("1f1b", (4, True), "must be 2 whole numbers of at least 1"),
        ("zb-h1", (2, 3), "stage 0 runs 2 forwards before its first backward, the next one 3, .*no stage more than"),
    ],
)
def test_wrong_warmups_name_the_fix(schedule: str, warmup: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        operations(schedule, 2, 0, 8, warmup=warmup)
    with pytest.raises(ValueError, match=words):
        far(1.0, schedule=schedule, warmup=warmup)


def test_messages_follow_each_other_over_a_distance() -> None:
    # Twelve messages leave within 12 s and arrive 100 s later each; one behind the other they would take 1200 s.
    result = simulate(far(100.0, schedule="gpipe"))
    # The first activation arrives at 101; the last stage needs 12 * 3 s, and its last gradient 100 s and 2 s more.
    assert result.step_s == pytest.approx(101 + 12 * 1 + 12 * 2 + 100 + 2)
    assert sum(result.critical_s.values()) == pytest.approx(result.step_s)
    for device in result.devices:
        assert device.busy_s + device.bubble_s + sum(device.exposed_s.values()) == pytest.approx(result.step_s)


def test_bytes_of_a_message_still_hold_up_the_next_one() -> None:
    way, back = Route({"a": 1.0}, 10.0), Route({"b": 1.0}, 10.0)
    step = Step((Stage(1.0, 2.0),) * 2, (Boundary(way, back, 5.0),), {"a": 1.0, "b": 1.0}, 4, "gpipe")
    # Activations leave at 1, 6, 11, 16 for 5 s and arrive 10 s later; gradients leave from 32 + 2 on, 5 s each.
    assert simulate(step).step_s == pytest.approx(16 + 5 + 10 + 1 + 2 + 4 * 5 + 10 + 2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_warmup_covers_the_round_trip(schedule: str) -> None:
    step = far(3.0, 32, schedule=schedule)
    (choice,) = choices_of(step, [32, 32])
    plain = simulate(step).step_s
    assert choice.warmup is not None
    assert choice.warmup[0] > 2
    assert choice.step_s == simulate(replace(step, warmup=choice.warmup)).step_s < 0.75 * plain
    best = min(
        simulate(replace(step, warmup=(one, other))).step_s for one in range(1, 33) for other in range(1, one + 1)
    )
    assert choice.step_s <= 1.01 * best
    # A stage that goes on with forwards holds no more micro-batches than it needs.
    assert choice.held[0] < 16


@pytest.mark.parametrize("latencies_s", [(5.0, 0.0, 0.5), (0.0, 8.0, 0.0), (2.0, 2.0, 2.0), (0.0, 0.0, 0.0)])
def test_only_the_far_boundary_is_deep(latencies_s: tuple[float, ...]) -> None:
    boundaries = tuple(Boundary(Route(latency_s=s), Route(latency_s=s)) for s in latencies_s)
    step = Step((Stage(1.0, 2.0),) * 4, boundaries, {}, 32)
    (choice,) = choices_of(step, [32] * 4)
    assert choice.step_s <= simulate(step).step_s
    assert choice.step_s <= 1.01 * simulate(replace(step, schedule="gpipe")).step_s
    if not any(latencies_s):
        assert choice.warmup is None
    else:
        assert choice.warmup is not None
        gaps = [a - b for a, b in zip(choice.warmup, choice.warmup[1:], strict=False)]
        assert gaps.index(max(gaps)) == latencies_s.index(max(latencies_s))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_memory_bounds_the_warmup(schedule: str) -> None:
    step = far(30.0, 32, schedule=schedule)
    (choice,) = choices_of(step, [5, 3])
    assert choice.held == (5, 1) if schedule == "1f1b" else max(choice.held) <= 3
    assert choices_of(step, [32, 32])[0].step_s < choice.step_s < simulate(step).step_s


def test_the_best_of_all_kinds() -> None:
    job, rates = far_job(0.5)
    found = best_schedule(job, rates)
    assert {choice.schedule for choice in found} == {"gpipe", "1f1b", "interleaved", "zb-h1"}
    for choice in found:
        again = replace(job, schedule=choice.schedule, chunks=choice.chunks, warmup=choice.warmup, group=choice.group)
        assert simulate(make_step(again, rates)).step_s == choice.step_s
    assert found[0].step_s <= 1.01 * min(choice.step_s for choice in found)
    assert all(one.step_s <= other.step_s for one, other in itertools.pairwise(found))
    plain = {name: simulate(make_step(replace(job, schedule=name), rates)).step_s for name in ("1f1b", "zb-h1")}
    assert found[0].step_s < 0.8 * min(plain.values())


def test_next_to_each_other_stages_keep_the_usual_schedules() -> None:
    job, rates = far_job(0.0, gbps=1000.0)
    assert all(choice.warmup is None for choice in best_schedule(job, rates))


def test_jitter_makes_the_warmup_deeper() -> None:
    job, rates = far_job(0.02, global_batch=64)
    _, jittery = far_job(0.02, jitter_s=0.02, global_batch=64)
    _, twice = far_job(0.04, global_batch=64)
    mine, other, same = (best_schedule(job, each, schedules=["1f1b"])[0] for each in (rates, jittery, twice))
    assert other.held[0] > mine.held[0]
    assert (other.warmup, other.step_s) == (same.warmup, same.step_s)


def test_memory_of_all_kinds() -> None:
    job, rates = far_job(0.5)
    found = best_schedule(job, rates, most=(4, 2))
    assert found
    assert all(choice.held[0] <= 4 and choice.held[1] <= 2 for choice in found)
    assert "gpipe" not in {choice.schedule for choice in found}
    for most, words in ((0, "must be 2 numbers of at least 1"), ((1, 2, 3), "must be 2 numbers of at least 1")):
        with pytest.raises(ValueError, match=words):
            best_schedule(job, rates, most=most)
    for most, schedules in ((4, ["gpipe"]), (1, ["interleaved"]), (None, [])):
        with pytest.raises(ValueError, match=r"none of the schedules .* 1f1b and zb-h1 fit any"):
            best_schedule(job, rates, most=most, schedules=schedules)


def warmed(**options) -> holmes.Plan:
    options = {"pipeline": 2, "micro_batch": 1, "global_batch": 32, "warmup": [6, 2]} | options
    return holmes.plan_for(topology_of([[2, 2], [2, 2]]), model_layers=8, **options)


def test_a_plan_keeps_its_warmup(tmp_path) -> None:
    plan = warmed()
    assert plan.warmup == (6, 2)
    assert "forwards of each stage before its first backward: [6, 2]" in plan.describe()
    plan.save(tmp_path / "plan.yaml")
    assert holmes.Plan.load(tmp_path / "plan.yaml") == plan
    assert "warmup" not in warmed(warmup=None).to_dict()  # releases that do not know it read the file
    with pytest.raises(ValueError, match=r"warmup is 6; it must be a list with the forwards of each stage"):
        holmes.Plan.from_dict(plan.to_dict() | {"warmup": 6})
    with pytest.raises(ValueError, match="the next one 6, for which it would wait forever"):
        warmed(warmup=[2, 6])


def test_a_plan_is_simulated_with_its_warmup_and_given_another_schedule() -> None:
    plan, topology = warmed(), topology_of([[2, 2], [2, 2]])
    job = job_of_plan(plan, topology, MODEL, Framework())
    assert job.warmup == (6, 2)
    assert job_of_plan(plan, topology, MODEL, Framework(), schedule="gpipe").warmup is None
    rates = Rates(1.0, {name: LinkRate(1.0, 0.1) for name in ("infiniband", "roce_v2", "ethernet")})
    for choice in best_schedule(job, rates):
        other = choice.plan(plan)
        assert (other.schedule, other.chunks, other.warmup) == (choice.schedule, choice.chunks, choice.warmup)
        assert other.layers_per_stage == plan.layers_per_stage


@pytest.mark.parametrize("form", ["megatron", "deepspeed", "torchtitan", "flagscale"])
def test_no_trainer_has_a_word_for_a_warmup(form: str) -> None:
    plan = holmes.plan_for(topology_of([[1], [1]]), model_layers=8, pipeline=2, micro_batch=1, global_batch=32)
    export_plan(plan, form)
    with pytest.raises(
        ValueError, match=r"warmup is \[6, 2\], but .* has no argument for it; .*holmes.pipeline_schedule"
    ):
        export_plan(replace(plan, warmup=(6, 2)), form)
    # What every trainer does anyhow needs no word.
    export_plan(replace(plan, warmup=(2, 1)), form)


def far_topology(latency_s: float, jitter_s: float = 0.0, **gpu) -> Topology:
    ports = [{"name": "eth0", "nic_class": "ethernet", "subnet": "wan", "speed_gbps": 25}]
    gpu = {"gpu_tflops": 100, "gpu_memory_gib": 300} | gpu
    hosts = [
        {"count": 2, "name": f"{name}{{}}", "ranks_per_host": 2, **gpu}
        | {"ports": [{"name": "ib0", "nic_class": "infiniband", "subnet": name, "speed_gbps": 200}, *ports]}
        for name in "ab"
    ]
    link = {"clusters": ["cluster 0", "cluster 1"], "fabric": "ethernet wan", "gbps": 20, "latency_s": latency_s}
    link |= {"pairs": 1, "aggregate_gbps": 20} | ({"jitter_s": jitter_s} if jitter_s else {})
    return Topology.from_dict({"kind": "holmes topology", "version": 2, "hosts": hosts, "links": [link]})


def searched(topology: Topology, trainer: str | None = None, schedule: str = "1f1b"):
    wanted = Wanted(1, 2, 1, schedule, recomputation="none", trainer=trainer)
    return search(topology, GPT, 128, wanted=wanted, simulated=2)


def test_the_search_knows_the_distance() -> None:
    near, far_away, jittery = far_topology(1e-5), far_topology(0.5), far_topology(0.5, 0.5)
    found = searched(far_away)
    best = found.best
    assert best.warmup is not None
    assert best.warmup[0] > (searched(near).best.warmup or (2, 1))[0]
    assert best.memory_bytes <= best.memory_limit_bytes
    assert found.plan().warmup == best.warmup
    assert f"forwards first {list(best.warmup)}" in found.reasons()[1]
    # A trainer has no word for it, and waits.
    plain = searched(far_away, trainer="deepspeed")
    assert plain.best.warmup is None
    assert best.step_s < 0.8 * plain.best.step_s
    assert searched(jittery).best.warmup[0] > best.warmup[0]
    assert Topology.from_dict(jittery.to_dict()) == jittery
    assert "jitter_s" not in far_away.to_dict()["links"][0]  # releases that do not know it read the file


def test_the_search_warms_within_memory() -> None:
    far_away = [searched(far_topology(0.5, gpu_memory_gib=gib)).best for gib in (300, 80)]
    roomy, tight = far_away
    assert tight.memory_bytes <= tight.memory_limit_bytes
    assert roomy.warmup[0] > (tight.warmup or (2, 1))[0]
    assert roomy.step_s < tight.step_s


def test_the_command_finds_and_saves_the_best_schedule(tmp_path) -> None:
    topology = topology_of([[2, 2], [2, 2]])
    plan = warmed(warmup=None, model=files.plain(MODEL))
    plan.save(tmp_path / "plan.yaml")
    topology.save(tmp_path / "topology.yaml")
    links = {name: LinkRate(1.0, 0.05) for name in ("infiniband", "roce_v2", "ethernet")}
    Rates(10.0, links).save(tmp_path / "rates.yaml")
    paths = [str(tmp_path / name) for name in ("plan.yaml", "topology.yaml", "rates.yaml", "best.yaml")]
    arguments = [paths[0], "--topology", paths[1], "--rates", paths[2]]
    command, runner = load("tools.cli.simulate:simulate"), CliRunner()
    done = runner.invoke(command, [*arguments, "--schedule", "best", "--output", paths[3]])
    assert done.exit_code == 0, done.output
    first = done.output.split("\n")[0]
    found = holmes.Plan.load(paths[3])
    assert found.warmup is not None
    assert f"{found.schedule} with {list(found.warmup)} forwards first: step" in first
    # What was saved takes as long as was said.
    again = runner.invoke(command, [paths[3], *arguments[1:]])
    assert again.output.strip() in done.output
    few = runner.invoke(command, [*arguments, "--schedule", "best", "--most", "3,2"])
    assert few.output.startswith("1f1b with [3, 1] forwards first"), few.output
    for wrong, words in (
        (["--schedule", "best", "--most", "few"], "--most 'few' must be whole numbers, such as 8, or 8,6"),
        (["--most", "3"], "--most, --sharing and --output are of --schedule best, but it is the plan"),
        (["--sharing", "3"], "--most, --sharing and --output are of --schedule best, but it is the plan"),
        (["--schedule", "best", "--most", "1,2,3"], "must be 2 numbers of at least 1"),
    ):
        refused = runner.invoke(command, [*arguments, *wrong])
        assert refused.exit_code != 0
        assert words in " ".join(re.sub(r"[^\x00-\x7f]", "", refused.output).split())


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("group", [None, 4, 6, 12])
def test_groups_of_micro_batches_go_through_a_chunk(stages: int, chunks: int, group: int | None) -> None:
    for stage in range(stages):
        order = operations("interleaved", stages, stage, 12, chunks, group=group)
        assert len(set(order)) == len(order) == 2 * 12 * chunks
        forwards = [(operation.micro_batch, operation.chunk) for operation in order if operation.phase == "F"]
        size = group or stages
        assert forwards[: 2 * size] == [(i, 0) for i in range(size)] + [(i, 1) for i in range(size)]
        held, most = 0, 0
        for operation in order:
            held += 1 if operation.phase == "F" else -1
            most = max(most, held)
        assert most == in_flight("interleaved", stages, chunks, 12, stage, None, group).sum(axis=1).max()
    step = far(2.0, 12, stages, schedule="interleaved", chunks=chunks)
    assert simulate(replace(step, group=group)).step_s > 0  # nothing waits in a circle


def test_larger_groups_cover_a_distance() -> None:
    step = far(2.0, 16, 2, schedule="interleaved", chunks=2)
    (choice,) = choices_of(step, [16, 16])
    assert choice.group in (4, 8, 16)
    assert choice.step_s < 0.9 * simulate(step).step_s
    assert choice.text() == f"interleaved x2 in groups of {choice.group}"
    assert choices_of(far(0.0, 16, 2, schedule="interleaved", chunks=2), [16, 16])[0].group is None
    assert choices_of(step, [3, 3])[0].group is None  # by memory


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"micro_batch_group": 8}, "micro_batch_group=8 is of the schedule interleaved, but it is '1f1b'"),
        ({"micro_batch_group": 1, "chunks": 2}, "micro_batch_group=1 must be a whole number, at least the 2 stages"),
        ({"micro_batch_group": 2.0, "chunks": 2}, "micro_batch_group=2.0 must be a whole number"),
        ({"micro_batch_group": 7, "chunks": 2}, "must divide the 8 micro-batches; the nearest that does: 8"),
    ],
)
def test_wrong_groups_name_the_fix(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        warmed(warmup=None, **options)


def test_megatron_is_told_the_group(tmp_path) -> None:
    plan = holmes.plan_for(
        topology_of([[1], [1]]),
        model_layers=8,
        pipeline=2,
        micro_batch=1,
        global_batch=32,
        chunks=2,
        micro_batch_group=8,
    )
    assert "--microbatch-group-size-per-virtual-pipeline-stage 8" in export_plan(plan, "megatron")
    assert "microbatch-group" not in export_plan(replace(plan, micro_batch_group=None), "megatron")
    assert "micro-batches through a chunk before the next one: 8" in plan.describe()
    plan.save(tmp_path / "plan.yaml")
    assert holmes.Plan.load(tmp_path / "plan.yaml") == plan
    with pytest.raises(ValueError, match="micro_batch_group is 8, but torchtitan has no argument for it"):
        export_plan(plan, "torchtitan")
    job = job_of_plan(plan, topology_of([[1], [1]]), MODEL, Framework())
    assert job.group == 8
    assert job_of_plan(plan, topology_of([[1], [1]]), MODEL, Framework(), schedule="gpipe", chunks=1)
