"""Partition: how many layers each pipeline stage gets."""

from __future__ import annotations


def split_evenly(layers: int, stages: int) -> tuple[int, ...]:
    """`layers` over `stages`, as even as possible; the first stages get the odd ones. The result sums to `layers`.

    Raises ValueError where a stage would stay empty.
    """
    if stages < 1:
        raise ValueError(f"pipeline={stages} must be at least 1")
    if layers < stages:
        raise ValueError(
            f"{layers} layers cannot fill {stages} pipeline stages; use pipeline={max(layers, 1)} or fewer, "
            f"or a model of at least {stages} layers"
        )
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))
