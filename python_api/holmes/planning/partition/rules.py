"""Rules that need no times of layers: an even split, and the Holmes paper's split by speed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holmes_comm.errors import UsageError

PAPER_ALPHA = 1.05  # of the Holmes paper (arXiv 2312.03549), section on self-adapting pipeline partition


def split_evenly(layers: int, stages: int) -> tuple[int, ...]:
    """`layers` over `stages`, as even as possible; the first stages get the odd ones. The result sums to `layers`.

    Raises ValueError where a stage would stay empty.
    """
    check_counts(layers, stages)
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def split_by_speed(layers: int, speeds: Sequence[float], alpha: float = PAPER_ALPHA) -> tuple[int, ...]:
    """The paper's rule: stage i of speed S_i gets floor(alpha * layers * S_i / sum of S), the last stage the rest.

    `speeds` in any one unit (the paper: TFLOP/s measured in each stage's network). Every stage gets at least one layer:
    a stage that the rule leaves empty gets one, and none takes what the later ones need. The result sums to `layers`.
    Raises ValueError where there are fewer layers than stages, or a speed or alpha is not positive and finite.
    """
    check_counts(layers, len(speeds))
    for name, value in [("alpha", alpha), *((f"speeds[{i}]", speed) for i, speed in enumerate(speeds))]:
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"{name}={value} must be positive and finite")
    counts: list[int] = []
    for stage, speed in enumerate(speeds[:-1]):
        # 1e-9: a product that is whole on paper must not lose a layer to rounding
        wanted = math.floor(alpha * layers * speed / sum(speeds) + 1e-9)
        available = layers - sum(counts) - (len(speeds) - stage - 1)
        counts.append(min(max(wanted, 1), available))
    return (*counts, layers - sum(counts))


def check_counts(layers: int, stages: int) -> None:
    """Raises ValueError where `layers` cannot give every one of `stages` at least one."""
    if stages < 1:
        raise UsageError(f"pipeline={stages} must be at least 1")
    if layers < stages:
        raise UsageError(
            f"{layers} layers cannot fill {stages} pipeline stages; use pipeline={max(layers, 1)} or fewer, "
            f"or a model of at least {stages} layers"
        )
