"""The order in which a pipeline stage works on its micro-batches, for each schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holmes.planning.schedule import check_group, check_schedule, check_warmup, interleaved_warmup, warmup_of
from holmes_comm.errors import UsageError


class Operation(NamedTuple):
    """One piece of a stage's work: phase "F" (forward), "B" (backward) or "W" (weight gradients, zero-bubble only)."""

    phase: str
    micro_batch: int
    chunk: int = 0


def check_sizes(
    schedule: str,
    stages: int,
    micro_batches: int,
    chunks: int,
    warmup: Sequence[int] | None = None,
    group: int | None = None,
) -> None:
    """Raises ValueError, with all numbers and the nearest fix, where the schedule does not fit the sizes."""
    check_schedule(schedule, chunks)
    check_warmup(schedule, warmup, stages)
    if stages < 1 or micro_batches < 1:
        raise UsageError(f"stages={stages} and micro_batches={micro_batches} must be at least 1")
    check_group(schedule, group, stages, micro_batches)
    if schedule == "interleaved" and group is None and micro_batches % stages:
        nearest = max(round(micro_batches / stages), 1) * stages
        raise UsageError(
            f"the interleaved schedule needs micro-batches that {stages} stages divide, but there are {micro_batches}; "
            f"the nearest number is {nearest}"
        )


def operations(
    schedule: str,
    stages: int,
    stage: int,
    micro_batches: int,
    chunks: int = 1,
    warmup: Sequence[int] | None = None,
    group: int | None = None,
) -> tuple[Operation, ...]:
    """All operations of one stage in the order in which its device runs them. `warmup`, `group`: as of a plan.

    Raises ValueError as `check_sizes`.
    """
    check_sizes(schedule, stages, micro_batches, chunks, warmup, group)
    if schedule == "gpipe":
        return _alternating(
            [Operation("F", i) for i in range(micro_batches)],
            [Operation("B", i) for i in range(micro_batches)],
            micro_batches,
        )
    if schedule == "interleaved":
        return _interleaved(stages, stage, micro_batches, chunks, group or stages)
    forward = [Operation("F", i) for i in range(micro_batches)]
    backward = [Operation("B", i) for i in range(micro_batches)]
    first = warmup_of(stages, stage, micro_batches, warmup)
    order = _alternating(forward, backward, first - 1)
    if schedule == "1f1b":
        return order
    return _with_weight_gradients(order, delay=stage if warmup is None else warmup[0] - warmup[stage])


def _alternating(forward: list[Operation], backward: list[Operation], warmup: int) -> tuple[Operation, ...]:
    """`warmup` forwards, then one forward and one backward in turns, then the backwards that are left."""
    order = forward[:warmup]
    for i, operation in enumerate(forward[warmup:]):
        order += [operation, backward[i]]
    return (*order, *backward[len(forward) - warmup :])


def _interleaved(stages: int, stage: int, micro_batches: int, chunks: int, group: int) -> tuple[Operation, ...]:
    """Megatron-LM's order: `group` micro-batches through one chunk, then through the next one."""
    forward, backward = [], []
    for index in range(micro_batches * chunks):
        block, inside = divmod(index, group * chunks)
        chunk, micro_batch = inside // group, block * group + inside % group
        forward.append(Operation("F", micro_batch, chunk))
        backward.append(Operation("B", micro_batch, chunks - 1 - chunk))
    return _alternating(forward, backward, min(interleaved_warmup(stages, stage, chunks, group), len(forward)))


def _with_weight_gradients(order: tuple[Operation, ...], delay: int) -> tuple[Operation, ...]:
    """ZB-H1: weight gradients follow their backward `delay` backwards later, so that they fill what would be idle at
    the end; with a delay of what its warm-up is shorter than the first stage's, no stage holds more than that one."""
    result: list[Operation] = []
    pending: list[Operation] = []
    for operation in order:
        result.append(operation)
        if operation.phase == "B":
            pending.append(Operation("W", operation.micro_batch))
            if len(pending) > delay:
                result.append(pending.pop(0))
    return (*result, *pending)
