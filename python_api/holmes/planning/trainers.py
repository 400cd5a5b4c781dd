"""What each trainer can run of a plan: the search keeps to it, and the exports check it."""

from __future__ import annotations

from dataclasses import dataclass

from holmes_comm.errors import UsageError


@dataclass(frozen=True)
class Trainer:
    """Its name in messages, its pipeline schedules, and what it can compute again before the backward."""

    title: str
    schedules: tuple[str, ...]
    recomputations: tuple[str, ...] = ("none", "selective", "full")


TRAINERS = {
    "megatron": Trainer("Megatron", ("1f1b", "interleaved")),
    "deepspeed": Trainer("DeepSpeed's pipeline", ("1f1b",), ("none", "full")),
    "torchtitan": Trainer("torchtitan", ("gpipe", "1f1b", "interleaved")),
    "flagscale": Trainer("FlagScale", ("1f1b",)),
}


def trainer_named(name: str) -> Trainer:
    """Raises ValueError naming those there are."""
    if name not in TRAINERS:
        raise UsageError(f"trainer {name!r} is unknown; known are {', '.join(TRAINERS)}")
    return TRAINERS[name]
