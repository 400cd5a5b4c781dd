"""Partitions: the paper's rule, the optimum against brute force, memory limits and their errors, interleaving."""

import itertools
import math
import random

import numpy as np
import pytest
from partition_cases import PAPER_MODELS, brute_force, random_problem

from holmes.planning.partition import (
    Layer,
    Link,
    PartitionProblem,
    Stage,
    Transformer,
    best_partition,
    equal_layers,
    evaluate,
    split_by_speed,
    split_evenly,
    transformer_layers,
)
from holmes.planning.partition.equal import best_of_equal, has_equal_layers
from holmes.planning.schedule import in_flight

PAPER_SPEEDS = (197.0, 160.0, 122.0)  # TFLOP/s over InfiniBand, RoCE and Ethernet: DESIGN.md, the paper's numbers


def check_against_brute_force(problem: PartitionProblem) -> bool:
    """Whether it has a solution; fails where the optimum differs."""
    best = brute_force(problem)
    if best == math.inf:
        with pytest.raises(ValueError, match=r"memory cannot fit: .* bytes"):
            best_partition(problem)
        return False
    found = best_partition(problem)
    assert found.is_optimal
    assert found.bottleneck_s == pytest.approx(best, rel=1e-12)
    assert sum(found.layers_per_stage) == sum(layer.kind == "transformer" for layer in problem.layers)
    return True


def test_the_optimum_equals_brute_force_on_1000_random_problems() -> None:
    solved = [check_against_brute_force(random_problem(random.Random(seed))) for seed in range(1000)]
    assert 600 < sum(solved) < 1000  # both problems that fit and problems that do not


def test_interleaved_optimum_equals_brute_force() -> None:
    solved = [check_against_brute_force(random_problem(random.Random(seed), chunks=2)) for seed in range(200)]
    assert 80 < sum(solved) < 200


def mid_size_problem(rng: random.Random) -> PartitionProblem:
    """8 parts of 20 differing layers: small enough to try all 50,388 partitions."""
    layers = tuple(
        Layer(
            rng.uniform(0.5, 1.5), rng.uniform(1, 3), state_bytes=rng.randint(5, 15), activation_bytes=rng.randint(1, 5)
        )
        for _ in range(20)
    )
    limit = rng.choice([None, 150])
    stages = tuple(Stage(rng.choice([0.8, 1, 1.25]), limit) for _ in range(4))
    return PartitionProblem(layers, stages, (), 8, "interleaved", chunks=2)


def test_the_search_for_large_interleaved_problems_is_close_to_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [mid_size_problem(random.Random(seed)) for seed in range(8)]
    optima = [best_partition(problem) for problem in problems]
    assert all(optimum.is_optimal for optimum in optima)
    monkeypatch.setattr("holmes.planning.partition.optimum.LISTED_PARTITIONS", 0)
    ratios = [
        best_partition(problem).bottleneck_s / optimum.bottleneck_s
        for problem, optimum in zip(problems, optima, strict=True)
    ]
    assert min(ratios) >= 1 - 1e-12
    assert max(ratios) < 1.03


def test_interleaved_equal_layers_are_exact() -> None:
    solved = 0
    for seed in range(150):
        rng = random.Random(seed)
        layer = Layer(1, 2, state_bytes=10, activation_bytes=rng.randint(0, 4), working_bytes=3, output_bytes=10**8)
        ends = Layer(1, 1, "embedding", 30, 2), Layer(1, 3, "head", 40, 5, working_bytes=9)
        stages, chunks = rng.choice([(2, 2), (3, 2), (2, 3)])
        layers = [layer] * rng.randint(stages * chunks, 10)
        layers = [ends[0], *layers, ends[1]] if rng.random() < 0.7 else layers
        limit = rng.choice([None, rng.randint(60, 250)])
        problem = PartitionProblem(
            tuple(layers),
            tuple(Stage(rng.choice([0.5, 1, 2]), limit) for _ in range(stages)),
            tuple(Link(rng.choice([1, 10])) for _ in range(stages)),
            rng.randint(1, 6),
            schedule="interleaved",
            chunks=chunks,
            overlap_transfers=rng.random() < 0.5,
        )
        if math.isinf(best := brute_force(problem)):
            continue
        solved += 1
        assert has_equal_layers(problem)
        assert best_of_equal(problem) is not None
        found = best_partition(problem)
        assert found.is_optimal
        assert found.bottleneck_s == pytest.approx(best, rel=1e-12)
        assert limit is None or max(found.memory_bytes) <= limit
    assert solved > 80


def test_equal_layers_are_spread_over_chunks_as_evenly_as_memory_allows() -> None:
    layer = Layer(1, 2, state_bytes=10, activation_bytes=3)
    uneven = 0
    for chunks, limit in itertools.product((3, 4), range(220, 400, 5)):
        problem = PartitionProblem((layer,) * 34, (Stage(1, limit),) * 2, (), 8, "interleaved", chunks)
        try:
            best = best_partition(problem)
        except ValueError:
            continue
        for stage, layers in enumerate(best.layers_per_stage):
            counts = in_flight("interleaved", 2, chunks, 8, stage)
            fits = [
                spread
                for spread in itertools.product(range(1, layers), repeat=chunks)
                if sum(spread) == layers
                and 10 * layers + max(3 * sum(a * b for a, b in zip(row, spread, strict=True)) for row in counts)
                <= limit
            ]
            least = min(sum(count**2 for count in spread) for spread in fits)
            own = best.layers_per_part[stage::2]
            assert sum(count**2 for count in own) == least
            uneven += max(own) - min(own) > 1
    assert uneven > 5


@pytest.mark.parametrize("layers", [128, 1000])
def test_deep_models_of_many_chunks_that_fill_memory_are_exact(layers: int) -> None:
    layer = Layer(1, 2, state_bytes=10, activation_bytes=3)
    problem = PartitionProblem((layer,) * layers, (Stage(1, 5.25 * layers),) * 4, (), 64, "interleaved", 8)
    best = best_partition(problem)
    assert best.is_optimal
    own = best.layers_per_part[0::4]
    assert max(own) - min(own) > 1, "memory holds no even spread"
    with pytest.raises(ValueError, match="memory cannot fit"):
        best_partition(PartitionProblem((layer,) * layers, (Stage(1, 2.5 * layers),) * 4, (), 64, "interleaved", 8))


@pytest.mark.parametrize("name", PAPER_MODELS)
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.1])
def test_never_worse_than_the_papers_rule(name: str, stages: int, alpha: float) -> None:
    model = PAPER_MODELS[name]
    layers = transformer_layers(model, micro_batch=4, flops_per_s=312e12 * 0.5)
    for speeds in itertools.product(PAPER_SPEEDS, repeat=stages):
        problem = PartitionProblem(layers, tuple(Stage(speed / PAPER_SPEEDS[0]) for speed in speeds))
        rule = evaluate(problem, split_by_speed(model.layers, speeds, alpha))
        best = best_partition(problem)
        assert sum(best.layers_per_stage) == model.layers
        assert best.bottleneck_s <= rule.bottleneck_s * (1 + 1e-12)


@pytest.mark.parametrize(("layers", "stages"), [(30, 4), (7, 7), (1, 1), (97, 8), (200, 64), (5, 3)])
def test_every_count_sums_up_exactly(layers: int, stages: int) -> None:
    best = best_partition(PartitionProblem(equal_layers(layers), (Stage(),) * stages))
    assert sum(best.layers_per_stage) == layers
    assert max(best.layers_per_stage) == math.ceil(layers / stages)
    assert max(best.layers_per_stage) - min(best.layers_per_stage) <= 1
    rng = random.Random(layers)
    for alpha in (0.5, 1.0, 1.05, 3.0):
        counts = split_by_speed(layers, [rng.uniform(0.01, 10) for _ in range(stages)], alpha)
        assert sum(counts) == layers
        assert min(counts) >= 1


def test_the_papers_rule() -> None:
    assert split_by_speed(30, [197, 160]) == (17, 13)  # floor(1.05 * 30 * 197 / 357) = floor(17.38)
    assert split_by_speed(30, [1, 1, 1, 1]) == (7, 7, 7, 9)  # the optimum: 8 at most
    assert split_by_speed(20, [1.0], alpha=1.05) == (20,)
    assert split_by_speed(40, [1, 1], alpha=1.05) == (21, 19)
    assert split_by_speed(4, [100, 1, 1, 1]) == (1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"speeds\[1\]=0 must be positive"):
        split_by_speed(4, [1, 0])
    with pytest.raises(ValueError, match=r"alpha=nan must be positive"):
        split_by_speed(4, [1, 1], alpha=math.nan)
    with pytest.raises(ValueError, match="3 layers cannot fill 4 pipeline stages; use pipeline=3"):
        split_by_speed(3, [1, 1, 1, 1])


def test_embedding_and_head_take_layers_off_the_ends() -> None:
    layers = (Layer(0.5, 0.5, "embedding"), *equal_layers(16), Layer(1, 2, "head"))
    best = best_partition(PartitionProblem(layers, (Stage(),) * 4))
    assert best.layers_per_stage == (4, 5, 5, 2)
    assert best.stage_s == (5, 5, 5, 5)
    assert best.cuts == (0, 5, 10, 15, 18)


def test_a_stage_may_hold_the_head_alone_where_allowed() -> None:
    layers = (*equal_layers(4), Layer(1, 2, "head"))
    stages = (Stage(),) * 3
    assert best_partition(PartitionProblem(layers, stages)).bottleneck_s == 4
    best = best_partition(PartitionProblem(layers, stages, least_layers=0))
    assert (best.layers_per_stage, best.bottleneck_s) == ((2, 2, 0), 3)


def test_a_slow_link_moves_the_cut_to_the_smaller_output() -> None:
    sizes = [8e8, 8e8, 1e6, 8e8]
    layers = tuple(Layer(1, 2, output_bytes=size) for size in sizes)
    fast = best_partition(PartitionProblem(layers, (Stage(),) * 2, (Link(400),)))
    slow = best_partition(PartitionProblem(layers, (Stage(),) * 2, (Link(1, 0.001),)))
    assert (fast.cuts, slow.cuts) == ((0, 2, 4), (0, 3, 4))
    assert slow.stage_s == pytest.approx((9 + 2 * 0.009, 3 + 2 * 0.009))
    hidden = best_partition(PartitionProblem(layers, (Stage(),) * 2, (Link(1),), overlap_transfers=True))
    assert hidden.cuts == (0, 2, 4)  # 6.4 s on the link beside 6 s on the stages, rather than 9 s on a stage
    assert hidden.bottleneck_s == pytest.approx(6.4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PartitionProblem(equal_layers(3), (Stage(),) * 4), "3 layers cannot fill 4 .* stages; use pipeline=3"),
        (
            lambda: PartitionProblem(equal_layers(7), (Stage(),) * 4, chunks=2, schedule="interleaved"),
            r"7 transformer layers .* cannot fill 4 stages \* 2 chunks = 8 .* use 3 stages or f.* at least 8 layers",
        ),
        (lambda: PartitionProblem(equal_layers(8), (Stage(),) * 4, (Link(1),)), "1 links for 4 stages .* must be 3"),
        (lambda: PartitionProblem(equal_layers(8), (Stage(),) * 2, chunks=2, schedule="gpipe"), "needs schedule='in"),
        (lambda: PartitionProblem(equal_layers(8), (Stage(),), schedule="fifo"), r"'fifo' is unknown; .*\['gpipe'"),
        (lambda: PartitionProblem(equal_layers(8), (Stage(),), micro_batches=0), "micro_batches=0"),
        (lambda: Stage(speed=0), "speed=0 of a stage must be positive"),
        (lambda: Stage(memory_bytes=-1), "memory_bytes=-1 of a stage must be positive"),
        (lambda: Link(0), "rate_gbps=0 of a link"),
        (lambda: Link(1, -1), "latency_s=-1 of a link"),
        (lambda: Layer(-1, 0), "forward_s=-1 of a layer"),
        (lambda: Layer(1, 1, "norm"), r"kind='norm' of a layer must be one of"),
        (lambda: evaluate(PartitionProblem(equal_layers(8), (Stage(),) * 2), [5, 4]), r"sum to 9; .* sum to 8"),
        (lambda: Transformer(2, 10, 3), "heads=3 must divide hidden=10"),
        (lambda: transformer_layers(PAPER_MODELS["3.6B"], micro_batch=0, flops_per_s=1), "micro_batch=0 must be"),
        (
            lambda: transformer_layers(PAPER_MODELS["3.6B"], micro_batch=1, flops_per_s=1, recomputation="half"),
            "recomputation='half' must be one of",
        ),
    ],
)  # fmt: skip
def test_bad_input_names_the_value_the_rule_and_the_fix(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_counts_that_are_no_whole_numbers_are_refused() -> None:
    layer = (Layer(1, 2),) * 4
    for name in ("micro_batches", "chunks", "least_layers"):
        for value in (2.5, 2.0, math.nan, math.inf):
            with pytest.raises(ValueError, match=f"{name}={value} must be a whole number"):
                PartitionProblem(layer, (Stage(), Stage()), **{name: value})  # type: ignore[arg-type]
    for split in (lambda: split_evenly(15 / 2, 2), lambda: split_by_speed(15 / 2, [1, 1])):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"layers=7\.5 must be a whole number"):
            split()
    assert split_evenly(np.int64(7), 2) == (4, 3)  # type: ignore[arg-type]


def test_equal_inputs_give_equal_partitions() -> None:
    for seed in range(50):
        problem, again = (random_problem(random.Random(seed), chunks=1 + seed % 2) for _ in range(2))
        if math.isfinite(brute_force(problem)):
            assert best_partition(problem) == best_partition(again)
