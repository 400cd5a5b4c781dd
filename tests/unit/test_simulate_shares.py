"""Replicas that differ, in speed or in shares, through the simulator."""

import dataclasses

import pytest
from test_shares import FAST_AND_SLOW, make, with_speeds
from topologies import two_clusters
from typer.testing import CliRunner

from holmes.planning.simulate import Framework, LinkRate, Rates, Transformer, best_schedule, job_of_plan, make_step
from holmes.planning.simulate import simulate as run
from holmes.tools.cli import load

RATES = Rates(0.01, {name: LinkRate(10.0) for name in ("infiniband", "roce_v2", "ethernet")})
MODEL = Transformer(layers=4, hidden=64, heads=4, sequence=32, vocabulary=128)


def job_for(**options):
    return job_of_plan(make(**options), FAST_AND_SLOW, MODEL, Framework())


def test_a_step_lasts_as_long_as_its_slowest_replica() -> None:
    equal, by_speed = job_for(), job_for(data_shares="speed")
    assert (equal.slowest.micro_batches, equal.slowest.speeds) == (2, (pytest.approx(1 / 3),))
    assert by_speed.slowest.micro_batches in (1, 3)  # 3 micro-batches in the time of 1
    slow_s, shared_s = (run(make_step(job, RATES)).step_s for job in (equal, by_speed))
    assert shared_s < 0.65 * slow_s
    assert run(make_step(by_speed.with_equal_shares(), RATES)).step_s == slow_s
    worse = job_for(data_shares=[1, 1, 3, 3])
    assert worse.slowest.micro_batches == 3
    assert run(make_step(worse, RATES)).step_s > slow_s


def test_no_replica_is_slower_than_the_slowest() -> None:
    job = job_for(data_shares=[5, 1, 1, 1])
    longest = max(
        run(make_step(dataclasses.replace(
            job, shares=None, speeds=(replica.speeds,) * 4, global_batch=8 * replica.micro_batches), RATES)).step_s
        for replica in job.replicas
    )  # fmt: skip
    assert run(make_step(job, RATES)).step_s == longest


def test_alike_replicas_are_simulated_as_ever() -> None:
    topology = two_clusters()
    job = job_of_plan(make(topology), topology, MODEL, Framework())
    assert (job.speeds, job.shares, job.micro_batches) == (None, None, 2)


def test_another_batch_does_not_fit_the_shares() -> None:
    with pytest.raises(ValueError, match="sums to 8 micro-batches, but global_batch=32 of micro_batch=2 is 16"):
        job_of_plan(make(data_shares=[3, 3, 1, 1]), FAST_AND_SLOW, MODEL, Framework(), global_batch=32)


def test_every_replica_must_run_the_schedule() -> None:
    topology = with_speeds(two_clusters(), 300.0, 100.0, 300.0, 100.0)
    plan = make(topology, pipeline=2, micro_batch=1, data_shares=[13, 3])
    for chunks in ({"schedule": "interleaved", "chunks": 2}, {"schedule": "interleaved", "chunks": 1}):
        job = job_of_plan(plan, topology, MODEL, Framework(), **chunks)
        with pytest.raises(ValueError, match="interleaved"):
            make_step(job, RATES)
    even = make(topology, pipeline=2, micro_batch=1, data_shares=[12, 4], chunks=2, schedule="interleaved")
    job = dataclasses.replace(job_of_plan(even, topology, MODEL, Framework()), speeds=None)
    for shares in ((3, 13), (12, 1)):  # the slowest one's number is right in the second
        with pytest.raises(ValueError, match=r"needs micro-batches that 2 stages divide, but there are [31];"):
            make_step(dataclasses.replace(job, global_batch=sum(shares), shares=shares), RATES)


def test_the_best_schedule_fits_every_replica() -> None:
    topology = with_speeds(two_clusters(), 300.0, 100.0, 300.0, 100.0)
    plan = make(topology, pipeline=2, micro_batch=1, data_shares=[11, 5])
    job = job_of_plan(plan, topology, MODEL, Framework())
    found = best_schedule(job, RATES)
    assert "interleaved" not in {choice.schedule for choice in found}
    even = make(topology, pipeline=2, micro_batch=1, data_shares=[12, 4])
    for base, choices in ((plan, found), (even, best_schedule(job_of_plan(even, topology, MODEL, Framework()), RATES))):
        for choice in choices:
            assert choice.plan(base).data_shares == base.data_shares


def test_the_command_line_shows_what_shares_gain(tmp_path) -> None:
    FAST_AND_SLOW.save(tmp_path / "topology.yaml")
    RATES.save(tmp_path / "rates.yaml")
    sizes = {name: getattr(MODEL, name) for name in ("layers", "hidden", "heads", "sequence", "vocabulary")}
    arguments = ["--topology", str(tmp_path / "topology.yaml"), "--rates", str(tmp_path / "rates.yaml")]
    for shares in (None, "speed"):
        make(data_shares=shares, model=sizes).save(tmp_path / "plan.yaml")
        result = CliRunner().invoke(load("tools.cli.simulate:simulate"), [str(tmp_path / "plan.yaml"), *arguments])
        assert result.exit_code == 0, result.output
        assert ("with equal shares: step" in result.output) == (shares is not None)
