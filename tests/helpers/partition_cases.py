"""Partition problems drawn at random, their solution by trying everything, and the paper's models."""

import itertools
import math
import random

from holmes.planning.partition import Layer, Link, PartitionProblem, Stage, Transformer

PAPER_MODELS = {
    "3.6B": Transformer(layers=30, hidden=3072, heads=32),
    "7.5B": Transformer(layers=36, hidden=4096, heads=32),
    "39.1B": Transformer(layers=48, hidden=8192, heads=64),
}


def brute_force(problem: PartitionProblem) -> float:
    """The least bottleneck by trying all partitions, in plain loops that share no code with what is tested."""
    stages, parts = len(problem.stages), len(problem.stages) * problem.chunks
    best = math.inf
    for inner in itertools.combinations(range(1, len(problem.layers)), parts - 1):
        cuts = [0, *inner, len(problem.layers)]
        held = [problem.layers[cuts[part] : cuts[part + 1]] for part in range(parts)]
        if any(sum(layer.kind == "transformer" for layer in part) < problem.least_layers for part in held):
            continue
        times, links, fits = [0.0] * stages, [0.0] * stages, True
        for part in range(parts):
            stage = part % stages
            times[stage] += (
                sum(layer.forward_s + layer.backward_s for layer in held[part]) / problem.stages[stage].speed
            )
            if problem.links and part < parts - 1:
                link = problem.links[stage]
                transfer = link.latency_s + held[part][-1].output_bytes * 8 / (link.rate_gbps * 1e9)
                if problem.overlap_transfers:
                    links[stage] += transfer
                else:
                    times[stage] += 2 * transfer
                    times[(part + 1) % stages] += 2 * transfer
        for stage in range(stages):
            own = held[stage::stages]
            peak = max(
                sum(
                    count * sum(layer.activation_bytes for layer in part)
                    for count, part in zip(counts, own, strict=True)
                )
                for counts in moments(problem, stage)
            )
            memory = peak + sum(layer.state_bytes for part in own for layer in part)
            memory += max(layer.working_bytes for part in own for layer in part)
            limit = problem.stages[stage].memory_bytes
            fits = fits and (limit is None or memory <= limit)
        if fits:
            best = min(best, max(times + links))
    return best


def moments(problem: PartitionProblem, stage: int) -> list[list[int]]:
    """Micro-batches in flight per chunk at every moment of a schedule, by running its order of passes."""
    p, m, v = len(problem.stages), problem.micro_batches, problem.chunks
    if v == 1:
        return [[{"gpipe": m, "1f1b": min(p - stage, m), "zb-h1": min(p, m)}[problem.schedule]]]
    forward = [c for g in range(0, m, p) for c in range(v) for _ in range(min(p, m - g))]
    backward = [v - 1 - c for c in forward]
    warm_up = min((p - stage - 1) * 2 + (v - 1) * p, m * v)
    passes = [(c, 1) for c in forward[:warm_up]]
    for i, c in enumerate(forward[warm_up:]):
        passes += [(c, 1), (backward[i], -1)]
    counts, seen = [0] * v, []
    for chunk, change in passes:
        counts[chunk] += change
        seen.append(list(counts))
    return seen


def random_problem(rng: random.Random, chunks: int = 1) -> PartitionProblem:
    stages = rng.randint(2 if chunks > 1 else 1, 3 if chunks > 1 else 5)
    count = rng.randint(stages * chunks, max(9, stages * chunks + 1))
    kinds = ["transformer"] * count
    if rng.random() < 0.5:
        kinds = ["embedding", *kinds, "head"]
    layers = [
        Layer(
            rng.uniform(0, 2) if kind != "transformer" else rng.uniform(0.5, 1.5),
            rng.uniform(0, 4),
            kind,
            state_bytes=rng.randint(0, 20),
            activation_bytes=rng.randint(0, 10),
            working_bytes=rng.randint(0, 10),
            output_bytes=rng.randint(0, 10) * 10**8,
        )
        for kind in kinds
    ]
    limit = rng.choice([None, rng.randint(40, 300)])
    return PartitionProblem(
        layers=tuple(layers),
        stages=tuple(
            Stage(rng.choice([0.5, 1, 1.5, 2]), limit if limit is None else limit + rng.randint(0, 60))
            for _ in range(stages)
        ),
        links=rng.choice(
            [(), tuple(Link(rng.choice([1, 5, 25]), rng.choice([0, 0.1])) for _ in range(stages - (chunks == 1)))]
        ),
        micro_batches=rng.randint(1, 9),
        schedule=rng.choice(["1f1b", "gpipe", "zb-h1"]) if chunks == 1 else "interleaved",
        chunks=chunks,
        overlap_transfers=rng.random() < 0.5,
        least_layers=rng.choice([0, 1, 1]),
    )
