"""Re-planning from step timings: right speeds, a better partition, and no proposal without a clear gain."""

import random

import pytest

from holmes.planning.partition import (
    PartitionProblem,
    Replanner,
    Stage,
    best_partition,
    equal_layers,
    evaluate,
    observed_speeds,
    replan,
    transformer_layers,
)
from holmes.planning.partition.transformer import Transformer

EQUAL = PartitionProblem(equal_layers(30), (Stage(),) * 3)
NOW = best_partition(EQUAL)  # 10, 10, 10 layers, 10 s each


def test_speeds_follow_from_times() -> None:
    assert observed_speeds(EQUAL, NOW, [10, 20, 5]) == (1.0, 0.5, 2.0)


def test_a_slow_stage_gives_layers_away() -> None:
    proposal = replan(EQUAL, NOW, [10, 20, 10])
    assert proposal is not None
    assert proposal.partition.layers_per_stage == (12, 6, 12)
    assert (proposal.current.bottleneck_s, proposal.partition.bottleneck_s) == (20, 12)
    assert proposal.gain == pytest.approx(0.4)
    assert proposal.describe() == (
        "layers per stage [10, 10, 10] -> [12, 6, 12]: bottleneck 20 s -> 12 s per micro-batch (40.0% less) at "
        "observed speeds [1.0, 0.5, 1.0]"
    )


def test_nothing_is_proposed_below_the_least_gain() -> None:
    times = [10, 11.5, 10]  # best: 10, 9, 11 layers; 11 s instead of 11.5 s, 4.3 % less
    assert replan(EQUAL, NOW, times, least_gain=0.05) is None
    assert replan(EQUAL, NOW, times, least_gain=0.04) is not None
    assert replan(EQUAL, NOW, [10, 10, 10], least_gain=0.0) is None


def test_real_layers_and_true_speeds_are_found_again() -> None:
    layers = transformer_layers(Transformer(36, 4096, 32), micro_batch=4, flops_per_s=150e12)
    guessed = PartitionProblem(layers, (Stage(1.0), Stage(1.0)))
    true = PartitionProblem(layers, (Stage(0.9), Stage(0.6)))
    current = best_partition(guessed)
    measured = evaluate(true, current.layers_per_stage).stage_s
    proposal = replan(guessed, current, measured)
    assert proposal is not None
    assert proposal.speeds == pytest.approx((0.9, 0.6))
    stages = tuple(Stage(speed) for speed in proposal.speeds)
    assert proposal.partition == best_partition(PartitionProblem(layers, stages))
    settled = evaluate(true, proposal.partition.layers_per_stage)
    assert replan(guessed, settled, settled.stage_s) is None  # what was adopted is not proposed again


def test_a_run_that_drifts_is_replanned_once() -> None:
    """30 % slower from step 30 on, 5 % noise, and single steps that stall tenfold."""
    rng = random.Random(3)
    replanner = Replanner(EQUAL, NOW, least_gain=0.05, window_steps=11)
    proposed = []
    for step in range(120):
        speeds = (1.0, 1.0, 1.0 if step < 30 else 0.7)
        true = PartitionProblem(EQUAL.layers, tuple(Stage(speed) for speed in speeds))
        exact = evaluate(true, replanner.current.layers_per_stage).stage_s
        times = [seconds * rng.uniform(0.975, 1.025) for seconds in exact]
        if step % 10 == 0:
            times[step % 3] *= 10
        proposal = replanner.observe(times)
        if proposal is not None:
            proposed.append(step)
            replanner.adopt(proposal)
    assert proposed == [43]  # the end of the first window that is slow for the most part
    assert replanner.current.layers_per_stage in [(11, 11, 8), (11, 12, 7), (12, 11, 7)]


@pytest.mark.parametrize(
    ("times", "options", "message"),
    [
        ([1, 2], {}, "2 observed times for 3 stages"),
        ([1, 0, 1], {}, "observed time 0 s of stage 1 must be positive"),
        ([1, 1, float("nan")], {}, "observed time nan s of stage 2"),
        ([1, 1, 1], {"least_gain": 1.0}, r"least_gain=1\.0 must be at least 0 and below 1"),
    ],
)
def test_bad_times_are_named(times: list[float], options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replan(EQUAL, NOW, times, **options)


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="window_steps=0 must be at least 1"):
        Replanner(EQUAL, NOW, window_steps=0)


def test_a_gain_that_no_window_could_have_is_refused_before_the_run() -> None:
    with pytest.raises(ValueError, match="least_gain=5 must be at least 0 and below 1"):
        Replanner(EQUAL, NOW, least_gain=5)
    with pytest.raises(ValueError, match=r"window_steps=2\.5 must be a whole number"):
        Replanner(EQUAL, NOW, window_steps=2.5)  # type: ignore[arg-type]
