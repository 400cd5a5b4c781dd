"""Memory of a partition: micro-batches in flight, modelled bytes, and errors that name stage, bytes and fix."""

import math
import random
import re

import pytest
from partition_cases import PAPER_MODELS, brute_force, random_problem

from holmes.planning.partition import Layer, PartitionProblem, Stage, best_partition, transformer_layers
from holmes.planning.schedule import in_flight


def test_micro_batches_in_flight() -> None:
    assert [in_flight("1f1b", 4, 1, 8, stage).tolist() for stage in range(4)] == [[[4]], [[3]], [[2]], [[1]]]
    assert in_flight("1f1b", 4, 1, 2, 0).tolist() == [[2]]
    assert in_flight("gpipe", 4, 1, 8, 3).tolist() == [[8]]
    assert in_flight("zb-h1", 4, 1, 8, 3).tolist() == [[4]]
    for stage in range(4):  # warm-up and the pass after it, of chunks of a stage
        most = max(sum(row) for row in in_flight("interleaved", 4, 2, 16, stage).tolist())
        assert most == (4 - stage - 1) * 2 + 4 + 1


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("chunks", [2, 3, 7])
def test_an_interleaved_order_repeats_whatever_the_number_of_micro_batches(stages: int, chunks: int) -> None:
    """Moments of an order that is written down whole, and of a billion micro-batches in no time."""
    for stage in range(stages):
        for rest in range(stages):
            few = [
                moments_in_flight(stages, chunks, groups * stages + rest, stage) for groups in (0, 1, 2, 3, 5, 6, 7, 9)
            ]
            for groups, expected in zip((0, 1, 2, 3, 5, 6, 7, 9), few, strict=True):
                if count := groups * stages + rest:
                    found = in_flight("interleaved", stages, chunks, count, stage).tolist()
                    assert found == expected, (count, stage)
            many = 10**9 // stages * stages + rest
            assert in_flight("interleaved", stages, chunks, many, stage).tolist() == few[-1]


def moments_in_flight(stages: int, chunks: int, micro_batches: int, stage: int) -> list[list[int]]:
    """Counted one by one along Megatron-LM's order; those that no other reaches in every chunk."""
    order = [
        chunk
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for _ in range(first, min(first + stages, micro_batches))
    ]
    warm_up = min((stages - stage - 1) * 2 + (chunks - 1) * stages, max(len(order) - 1, 0))
    held = [0] * chunks
    seen = set()
    for number, chunk in enumerate(order):
        held[chunk] += 1
        if number >= warm_up:
            seen.add(tuple(held))
            held[chunks - 1 - order[number - warm_up]] -= 1
    return sorted(list(row) for row in seen if not any(row != o and all(map(int.__le__, row, o)) for o in seen))


def test_first_stages_hold_more_micro_batches_and_so_fewer_layers() -> None:
    layers = tuple(Layer(1, 2, state_bytes=10, activation_bytes=10) for _ in range(12))
    for schedule, expected in (("1f1b", (3, 4, 5)), ("gpipe", None)):
        problem = PartitionProblem(layers, (Stage(1, 130),) * 3, (), 8, schedule)
        if expected is None:
            with pytest.raises(ValueError, match="memory cannot fit"):
                best_partition(problem)
        else:
            assert best_partition(problem).layers_per_stage == expected


def test_memory_that_cannot_fit_names_stage_bytes_and_the_least_stages() -> None:
    layers = tuple(Layer(1, 2, state_bytes=10, activation_bytes=10) for _ in range(12))
    problem = PartitionProblem(layers, (Stage(1, 100),) * 3, (), 8)
    with pytest.raises(ValueError, match="memory cannot fit") as caught:
        best_partition(problem)
    message = str(caught.value)
    over = re.search(r"stage 1 most \(stage 1 120 bytes of 100 bytes, over by 20 bytes", message)
    assert over, message
    least = int(re.search(r"the smallest number of stages that fits is (\d+)", message)[1])
    fitting = [
        count
        for count in range(1, 13)
        if math.isfinite(brute_force(PartitionProblem(layers, (Stage(1, 100),) * count, (), 8)))
    ]
    assert least == fitting[0]
    more = int(re.search(r"([\d,]+) bytes more memory on every stage suffice", message)[1])
    assert more == 20
    best_partition(PartitionProblem(layers, (Stage(1, 100 + more),) * 3, (), 8))
    with pytest.raises(ValueError, match="memory cannot fit"):
        best_partition(PartitionProblem(layers, (Stage(1, 100 + more - 1),) * 3, (), 8))


def test_a_layer_that_fits_nowhere_is_named() -> None:
    layers = (Layer(1, 2, "embedding", state_bytes=90), *(Layer(1, 2, state_bytes=20) for _ in range(4)))
    with pytest.raises(
        ValueError, match=r"layer 0 \(embedding\), with the layers .* needs 110 bytes .* limit is 100 b"
    ):
        best_partition(PartitionProblem(layers, (Stage(1, 100),) * 2))


def test_an_interleaved_problem_that_cannot_fit_names_a_number_that_does() -> None:
    layers = tuple(Layer(1, 2, state_bytes=10) for _ in range(40))
    with pytest.raises(ValueError, match=r"found with chunks=2.* stage \d+ 200 bytes of 100 bytes.* 4 stages fit;"):
        best_partition(PartitionProblem(layers, (Stage(1, 100),) * 2, (), 8, "interleaved", chunks=2))


def test_random_memory_errors_tell_what_suffices() -> None:
    checked = 0
    for seed in range(1500):
        problem = random_problem(random.Random(seed))
        if any(stage.memory_bytes is None for stage in problem.stages) or math.isfinite(brute_force(problem)):
            continue
        with pytest.raises(ValueError, match="memory cannot fit") as caught:
            best_partition(problem)
        more = int(re.search(r"([\d,]+) bytes more memory", str(caught.value))[1].replace(",", ""))
        for extra, fits in ((more, True), (more - 1, False)):
            stages = tuple(Stage(stage.speed, stage.memory_bytes + extra) for stage in problem.stages)
            other = PartitionProblem(problem.layers, stages, (), problem.micro_batches, problem.schedule,
                                     least_layers=problem.least_layers)  # fmt: skip
            assert math.isfinite(brute_force(other)) == fits
        checked += 1
    assert checked > 20


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_modelled_layers_add_up_to_the_papers_flops_and_parameters(name: str) -> None:
    model = PAPER_MODELS[name]
    layers = transformer_layers(model, micro_batch=4, flops_per_s=1.0)
    s, h, v, count = model.sequence, model.hidden, model.vocabulary, model.layers
    flops = 96 * s * count * h**2 * (1 + s / (6 * h) + v / (16 * count * h))
    assert sum(layer.forward_s + layer.backward_s for layer in layers) / 4 == pytest.approx(flops)
    parameters = 12 * count * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * count * h))
    assert model.parameters == pytest.approx(parameters)
    assert float(name[:-1]) == pytest.approx(parameters / 1e9, abs=0.06)
    assert sum(layer.state_bytes for layer in layers) == 18 * (model.parameters + v * h)  # the head's own copy


def test_recomputation_trades_time_for_memory() -> None:
    kinds = {
        kind: transformer_layers(PAPER_MODELS["7.5B"], micro_batch=1, flops_per_s=1e14, recomputation=kind)[1]
        for kind in ("none", "selective", "full")
    }
    assert kinds["none"].backward_s == pytest.approx(2 * kinds["none"].forward_s)
    assert kinds["full"].backward_s == pytest.approx(3 * kinds["full"].forward_s)
    assert kinds["none"].backward_s < kinds["selective"].backward_s < kinds["full"].backward_s
    assert kinds["none"].activation_bytes > kinds["selective"].activation_bytes > kinds["full"].activation_bytes
    totals = {layer.activation_bytes + layer.working_bytes for layer in kinds.values()}
    assert len(totals) == 1
