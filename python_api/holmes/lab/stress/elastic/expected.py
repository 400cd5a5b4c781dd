"""What an unbroken run trains."""

from __future__ import annotations

DECAY = 0.999


def gradient(step: int) -> float:
    """Of a step, equal on all ranks: a whole number, so that its mean over any number of ranks is exact."""
    return float((step * 2654435761) % 1009)


def unbroken(steps: int) -> float:
    """The weight after so many steps."""
    weight = 0.0
    for step in range(steps):
        weight = weight * DECAY + gradient(step)
    return weight
