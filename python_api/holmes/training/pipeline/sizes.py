"""Sizes of micro-batches: the first stage's rank tells the others before each step, and stages prepare for each."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage as TorchPipelineStage
from torch.utils._pytree import tree_flatten

from holmes.training.pipeline.stage import FIRST_TAG, TAGGED_BACKENDS


class SizeAnnouncer:
    """What the first stage's rank knows of a step, told from rank to rank: a message of 8 bytes a micro-batch. Local.

    Equal numbers are micro-batches of equal shapes, in this step and in others.
    """

    def __init__(self, stages: Sequence[TorchPipelineStage]) -> None:
        self._group, self._rank, self._size = stages[0].group, stages[0].group_rank, stages[0].group_size
        self._tag = FIRST_TAG + 2 * stages[0].num_stages  # behind those of the stages
        on_cpu = all(stage.device.type == "cpu" for stage in stages)
        #: Else messages may be NCCL's: ranks are not told, and sizes may not change.
        self.can_tell = on_cpu and dist.get_backend(self._group) in TAGGED_BACKENDS
        self._known: dict[Hashable, int] = {}
        self._sent: tuple[dist.Work, torch.Tensor] | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return self._rank == 0

    def numbers_of(self, arguments: Sequence[Any]) -> list[int]:
        """Of micro-batches with these arguments, on the first stage's rank."""
        return [self._known.setdefault(_shape_of(each), len(self._known)) for each in arguments]

    def tell(self, numbers: list[int]) -> list[int]:
        """The first rank's numbers on every rank (negative: it refuses); others' do not count.

        Collective over the pipeline group; a rank does not wait for those behind it.
        """
        told = torch.tensor(numbers)
        if not self.is_first:
            dist.recv(told, group=self._group, group_src=self._rank - 1, tag=self._tag)
        self.finish()
        if self._rank + 1 < self._size:
            work = dist.isend(told, group=self._group, group_dst=self._rank + 1, tag=self._tag)
            self._sent = None if work is None else (work, told)
        return told.tolist()

    def finish(self) -> None:
        """What was sent has arrived."""
        if self._sent is not None:
            self._sent[0].wait()
            self._sent = None


class StageMetas:
    """What stages know of their boundaries, for each shape of micro-batches that they have seen. Not thread-safe."""

    def __init__(self, stages: Sequence[Any]) -> None:
        self._stages = stages
        self._seen: dict[tuple[int, bool], list[Any]] = {}  # (number, has_backward) -> of each stage

    def missing(self, numbers: Sequence[int], has_backward: bool) -> list[int]:
        """Those of the numbers that are new, once each."""
        return [number for number in dict.fromkeys(numbers) if (number, has_backward) not in self._seen]

    def keep(self, number: int, has_backward: bool) -> None:
        """The stages have just found out about micro-batches of this number."""
        self._seen[number, has_backward] = [replace(stage._stage_meta) for stage in self._stages]

    def prepare(self, numbers: Sequence[int], has_backward: bool) -> None:
        """Makes the buffers for a step whose micro-batches have these numbers."""
        for index, stage in enumerate(self._stages):
            metas = {number: self._seen[number, has_backward][index] for number in numbers}
            infos = {number: _buffers(stage, meta, len(numbers), has_backward) for number, meta in metas.items()}
            for chunk, number in enumerate(numbers):
                stage.args_recv_info[chunk] = infos[number][0][chunk]
                if has_backward:
                    stage.grad_recv_info[chunk] = infos[number][1][chunk]
            if len(metas) > 1:
                stage.chunk_metas = {chunk: metas[number] for chunk, number in enumerate(numbers)}
            else:
                stage.chunk_metas = {}


def _buffers(stage: TorchPipelineStage, meta: Any, count: int, has_backward: bool) -> tuple[Any, Any]:
    """For receives of activations and of gradients, by micro-batch, as if all were alike."""
    stage._stage_meta = meta
    stage._setup_forward_recv_info(count, has_backward)
    stage._setup_forward_send_info()
    if has_backward:
        stage._setup_backward_recv_info(count)
    return dict(stage.args_recv_info), dict(stage.grad_recv_info)


def _shape_of(arguments: Any) -> Hashable:
    leaves, structure = tree_flatten(arguments)
    return str(structure), tuple(
        (each.shape, each.dtype, each.requires_grad) if isinstance(each, torch.Tensor) else type(each)
        for each in leaves
    )
