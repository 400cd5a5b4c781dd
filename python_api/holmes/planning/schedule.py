"""Pipeline schedules: one set of names for plan, partition and simulator, how many micro-batches a stage holds, and
what each trainer can run: the search keeps to that, and the exports check it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from holmes_comm.errors import UsageError

#: "gpipe" (Huang et al., arXiv 1811.06965), "1f1b" (Narayanan et al., arXiv 2104.04473), "interleaved" (the same with
#: several chunks of the model on each stage, as Megatron-LM runs it), "zb-h1" (Qi et al., arXiv 2401.10241).
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
#: Those whose warm-up may be another one than theirs: a stage goes on with forwards while gradients are on their way.
WARMED = ("1f1b", "zb-h1")
_GROUPS = 6  # of micro-batches, in which every moment of an interleaved order occurs


def check_schedule(schedule: str, chunks: int) -> None:
    """Raises ValueError where the name is unknown, or a stage does not hold several chunks just where interleaved."""
    if schedule not in SCHEDULES:
        raise UsageError(f"schedule={schedule!r} is unknown; it must be one of {list(SCHEDULES)}")
    if chunks < 1:
        raise UsageError(f"chunks={chunks} must be at least 1")
    if chunks > 1 and schedule != "interleaved":
        raise UsageError(
            f"chunks={chunks} needs schedule='interleaved', but it is {schedule!r}; use that schedule, or chunks=1"
        )
    if chunks == 1 and schedule == "interleaved":
        raise UsageError("schedule='interleaved' needs chunks of 2 or more; with one chunk a stage it is '1f1b'")


def fits_rounds(schedule: str, stages: int, micro_batches: int) -> bool:
    """Whether the schedule runs so many micro-batches.

    "interleaved": a number that the stages divide. "zb-h1", as torch has it: one that the whole rounds of `stages` in
    it divide. All others: any.
    """
    if schedule == "interleaved":
        return micro_batches % stages == 0
    return schedule != "zb-h1" or micro_batches % max(micro_batches // stages, 1) == 0


def check_warmup(schedule: str, warmup: Sequence[int] | None, stages: int) -> None:
    """Raises ValueError where these are not forwards that each of so many stages runs before its first backward."""
    if warmup is None:
        return
    if schedule not in WARMED:
        raise UsageError(
            f"warmup={list(warmup)} is of the schedules {' and '.join(WARMED)}, but it is {schedule!r}; leave it out"
        )
    if len(warmup) != stages or not all(type(count) is int and count >= 1 for count in warmup):
        raise UsageError(f"warmup={list(warmup)} must be {stages} whole numbers of at least 1, one for each stage")
    later = next((i for i in range(stages - 1) if warmup[i] < warmup[i + 1]), None)
    if later is not None:
        raise UsageError(
            f"warmup={list(warmup)}: stage {later} runs {warmup[later]} forwards before its first backward, the next "
            f"one {warmup[later + 1]}, for which it would wait forever; give no stage more than the one before it"
        )


def check_group(schedule: str, group: int | None, stages: int, micro_batches: int | None = None) -> None:
    """Raises ValueError where so many micro-batches cannot go through a chunk before the next chunk's turn."""
    if group is None:
        return
    if schedule != "interleaved":
        raise UsageError(
            f"micro_batch_group={group} is of the schedule interleaved, but it is {schedule!r}; leave it out"
        )
    if type(group) is not int or group < stages:
        raise UsageError(f"micro_batch_group={group!r} must be a whole number, at least the {stages} stages")
    if micro_batches is not None and micro_batches % group:
        fitting = [size for size in range(stages, micro_batches + 1) if micro_batches % size == 0]
        nearest = min(fitting, key=lambda size: abs(size - group), default=stages)
        raise UsageError(
            f"micro_batch_group={group} must divide the {micro_batches} micro-batches; the nearest that does: {nearest}"
        )


#: Pipelines that can be told apart where they take turns.
MOST_TURNS = 16


def check_turns(turns: int | None, stages: int, data: int | None = None) -> None:
    """Raises ValueError where no so many pipelines can take turns on what joins their stages."""
    if turns is None:
        return
    most = MOST_TURNS if data is None else min(data, MOST_TURNS)
    if stages < 2 or most < 2:
        raise UsageError(
            f"turns={turns!r} is of two pipelines or more that have stages, but there are {stages} stages"
            f"{'' if data is None else f' and {data} pipelines'}; leave it out"
        )
    if type(turns) is not int or not 2 <= turns <= most:
        raise UsageError(f"turns={turns!r} must be a whole number from 2 to {most}, of the pipelines that take turns")


def warmup_of(stages: int, stage: int, micro_batches: int, warmup: Sequence[int] | None = None) -> int:
    """Forwards of a stage before its first backward, in "1f1b" and "zb-h1": of stages next to each other as many as
    there are stages from it on; over a distance more (`warmup`, of all stages), up to all, which is "gpipe"."""
    return min(stages - stage if warmup is None else warmup[stage], micro_batches)


@lru_cache(maxsize=4096)
def in_flight(
    schedule: str,
    stages: int,
    chunks: int,
    micro_batches: int,
    stage: int,
    warmup: tuple[int, ...] | None = None,
    group: int | None = None,
) -> npt.NDArray[np.int64]:
    """Micro-batches in flight of each chunk of `stage`, a row for each moment that may be the peak: (moments, chunks).

    "gpipe": all micro-batches. "1f1b": its warm-up (`warmup_of`). "zb-h1" (Qi et al., arXiv 2401.10241): every stage as
    the first of 1F1B. "interleaved" (Narayanan et al., arXiv 2104.04473), as Megatron-LM runs it:
    `interleaved_warmup` chunk-forwards of warm-up, micro-batches in groups of `group`, by itself as many as `stages`.
    """
    if schedule != "interleaved":
        if schedule == "gpipe":
            return np.array([[micro_batches]])
        return np.array([[warmup_of(stages, stage if schedule == "1f1b" else 0, micro_batches, warmup)]])
    group = group or stages
    # Groups repeat: the warm-up lies in the first ones, and the last one may be shorter.
    micro_batches = min(micro_batches, _GROUPS * group + micro_batches % group)
    order = [
        chunk
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for _ in range(first, min(first + group, micro_batches))
    ]
    forward = np.eye(chunks, dtype=np.int64)[order]
    backward = forward[:, ::-1]
    held = min(interleaved_warmup(stages, stage, chunks, group) + 1, len(order))
    done_forward = np.cumsum(forward, axis=0)[held - 1 :]
    done_backward = np.vstack([np.zeros((1, chunks), np.int64), np.cumsum(backward, axis=0)])[: len(done_forward)]
    return _undominated(np.unique(done_forward - done_backward, axis=0))


def interleaved_warmup(stages: int, stage: int, chunks: int, group: int) -> int:
    """Chunk-forwards of Megatron-LM before its first pair of a forward and a backward."""
    return (stages - stage - 1) * 2 + (chunks - 1) * group


def _undominated(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows that no other row reaches in every column: only they can be the peak."""
    reached = np.asarray((rows[None, :, :] >= rows[:, None, :]).all(axis=2))
    np.fill_diagonal(reached, False)
    return rows[~reached.any(axis=1)]


@dataclass(frozen=True)
class Trainer:
    """Its name in messages, its pipeline schedules, and what it can compute again before the backward.

    `fills_1f1b`: its 1F1B takes no fewer micro-batches than stages. `groups`: it can be told how many micro-batches go
    through a chunk before the next one.
    """

    title: str
    schedules: tuple[str, ...]
    recomputations: tuple[str, ...] = ("none", "selective", "full")
    fills_1f1b: bool = False
    groups: bool = False

    def runs(self, schedule: str, stages: int, micro_batches: int) -> bool:
        """Whether it has enough micro-batches for its 1F1B."""
        return not self.fills_1f1b or schedule != "1f1b" or micro_batches >= stages


TRAINERS = {
    "megatron": Trainer("Megatron", ("1f1b", "interleaved"), groups=True),
    "deepspeed": Trainer("DeepSpeed's pipeline", ("1f1b",), ("none", "full")),
    "torchtitan": Trainer("torchtitan", ("gpipe", "1f1b", "interleaved"), fills_1f1b=True),
    "flagscale": Trainer("FlagScale", ("1f1b",)),
}


def trainer_named(name: str) -> Trainer:
    """Raises ValueError naming those there are."""
    if name not in TRAINERS:
        raise UsageError(f"trainer {name!r} is unknown; known are {', '.join(TRAINERS)}")
    return TRAINERS[name]
