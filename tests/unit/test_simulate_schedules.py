"""Schedules against closed forms."""

from __future__ import annotations

import pytest

from holmes.planning.simulate import SCHEDULES, Boundary, Route, Stage, Step, operations, simulate

SIZES = [(1, 1), (1, 4), (2, 2), (2, 12), (3, 6), (4, 8), (8, 8), (8, 32)]


def equal_step(stages: int, micro_batches: int, schedule: str, chunks: int = 1) -> Step:
    """Stages that are equally fast: 1 s forward, 2 s backward; transfers cost nothing."""
    boundaries = stages if chunks > 1 else stages - 1
    return Step((Stage(1.0, 2.0),) * stages, (Boundary(),) * boundaries, {}, micro_batches, schedule, chunks)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(schedule: str, stages: int, micro_batches: int) -> None:
    result = simulate(equal_step(stages, micro_batches, schedule))
    assert result.step_s == 3 * (micro_batches + stages - 1)
    assert result.bubble_share == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_bubble_of_interleaved(stages: int, micro_batches: int, chunks: int) -> None:
    if micro_batches % stages:
        pytest.skip("the schedule needs whole blocks")
    result = simulate(equal_step(stages, micro_batches, "interleaved", chunks))
    assert result.step_s == pytest.approx(3 * (micro_batches + (stages - 1) / chunks))
    assert result.bubble_share == pytest.approx((stages - 1) / (micro_batches * chunks + stages - 1))


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (3, 6), (4, 8), (8, 16)])
def test_zero_bubble_waits_a_third_as_long_as_1f1b(stages: int, micro_batches: int) -> None:
    zero_bubble = simulate(equal_step(stages, micro_batches, "zb-h1"))
    # (p - 1)(forward + input gradients - weight gradients), each 1 s here
    assert zero_bubble.step_s == 3 * micro_batches + stages - 1
    assert zero_bubble.bubble_share < simulate(equal_step(stages, micro_batches, "1f1b")).bubble_share


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stage", range(4))
def test_every_micro_batch_once_forward_first(schedule: str, stage: int) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    order = operations(schedule, 4, stage, 8, chunks)
    phases = "FBW" if schedule == "zb-h1" else "FB"
    assert len(order) == len(set(order)) == 8 * chunks * len(phases)
    places = {(op.phase, op.micro_batch, op.chunk): i for i, op in enumerate(order)}
    for micro_batch in range(8):
        for chunk in range(chunks):
            at = [places[phase, micro_batch, chunk] for phase in phases]
            assert at == sorted(at)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("stage", range(4))
def test_no_stage_holds_more_micro_batches_than_stages(schedule: str, stage: int) -> None:
    held = most = 0
    for operation in operations(schedule, 4, stage, 16):
        frees = operation.phase == ("W" if schedule == "zb-h1" else "B")
        held += 1 if operation.phase == "F" else -1 if frees else 0
        most = max(most, held)
    assert most <= 4


@pytest.mark.parametrize("micro_batches", range(1, 9))
def test_an_activation_pays_for_its_way(micro_batches: int) -> None:
    # Two stages have two micro-batches in flight: each round trip of a pair costs two transfers.
    transfer_s = 0.25
    boundary = Boundary(Route({"a": 1.0}), Route({"b": 1.0}), transfer_s)
    result = simulate(Step((Stage(1.0, 2.0),) * 2, (boundary,), {"a": 1.0, "b": 1.0}, micro_batches))
    round_trips = (micro_batches + 1) // 2
    assert result.step_s == pytest.approx(3 * (micro_batches + 1) + 2 * transfer_s * round_trips)
    assert result.critical_s["compute"] == pytest.approx(3 * (micro_batches + 1))
    assert result.bottleneck_link in ("a", "b")


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "chunks", "words"),
    [
        ("2f2b", 2, 4, 1, "'2f2b' is unknown"),
        ("interleaved", 4, 6, 2, "nearest number is 8"),
        ("1f1b", 2, 4, 2, "needs schedule='interleaved'"),
        ("interleaved", 2, 4, 1, "needs chunks of 2 or more"),
        ("gpipe", 2, 0, 1, "micro_batches=0"),
    ],
)
def test_wrong_sizes_name_the_fix(schedule: str, stages: int, micro_batches: int, chunks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        operations(schedule, stages, 0, micro_batches, chunks)
