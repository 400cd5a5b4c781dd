"""What Holmes adds to torch's schedules: batches of any size, losses by share, evaluation without a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining._utils import _StageMeta
from torch.distributed.pipelining.schedules import Schedule1F1B, _PipelineSchedule
from torch.utils._pytree import tree_leaves

from holmes.training.pipeline.sizes import SizeAnnouncer, StageMetas
from holmes_comm.errors import UsageError

_Schedule: Any = _PipelineSchedule  # whose methods are untyped or abstract


class Steps(_Schedule):  # type: ignore[misc]
    """Put before one of torch's schedule classes: its `step` and `eval`, with sizes that the first stage's rank tells.

    Batches may have another size in each step, and need not be divisible by the number of micro-batches. Raises
    ValueError on every rank, before activations are sent, where a batch has fewer samples than there are micro-batches.
    Not thread-safe.
    """

    def __init__(self, stages: Any, micro_batches: int, **options: Any) -> None:
        # torch's 1F1B refuses fewer micro-batches than stages, but its steps are right with them.
        least = stages.num_stages if isinstance(self, Schedule1F1B) else 1
        super().__init__(stages, max(micro_batches, least), scale_grads=False, **options)
        self._n_microbatches = micro_batches
        self._own: Sequence[Any] = stages if isinstance(stages, list) else [stages]
        self._announcer = SizeAnnouncer(self._own)
        self._metas = StageMetas(self._own)
        self._numbers: list[int] = []  # of this step's micro-batches; empty: torch prepares the stages
        self._token = object()  # of this schedule
        self._fixed: tuple[int, bool] | None = None
        self._samples = 0

    def step(
        self,
        *args: Any,
        target: torch.Tensor | None = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As torch's."""
        self._agree(args, kwargs)
        self._check_target(target)
        result = super().step(
            *args, target=target, losses=losses, return_outputs=return_outputs, loss_kwargs=loss_kwargs, **kwargs
        )
        self._announcer.finish()
        return result

    def _agree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        numbers = self._own_numbers(args, kwargs) if self._announcer.is_first else [0] * self._n_microbatches
        if self._announcer.can_tell:
            numbers = self._numbers = self._announcer.tell(numbers)
        if numbers[0] < 0:
            raise UsageError(self._too_small("the first stage's batch", -1 - numbers[0]))
        if not self._announcer.can_tell:
            self._check_fixed(numbers)

    def _own_numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        try:
            split = list(zip(*self._split_inputs(args, kwargs), strict=True))
        except AssertionError:  # of a tensor that is too small; elsewhere torch makes fewer pieces
            split = []
        if len(split) == self._n_microbatches:
            return self._announcer.numbers_of(split)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each.ndim]
        return [-1 - min(map(len, tensors), default=0)] * self._n_microbatches

    def _too_small(self, what: str, samples: int) -> str:
        return (
            f"{what} has {samples} samples, but micro_batches={self._n_microbatches} need at least one each; leave "
            "such batches out (DataLoader(drop_last=True)), or make a schedule with fewer micro_batches"
        )

    def _check_fixed(self, numbers: list[int]) -> None:
        """Where ranks cannot be told, sizes are those of the first step after a change between `step` and `eval`."""
        if self._fixed is None or self._fixed[1] != self._has_backward:
            self._fixed = (numbers[0], self._has_backward)
        if set(numbers) != {self._fixed[0]}:
            raise UsageError(
                "micro-batches are not all of one size, or not of that of the first step, which needs stages on the "
                "CPU over the backend holmes or gloo; elsewhere give batches of one size, divisible by "
                f"micro_batches={self._n_microbatches} (DataLoader(drop_last=True))"
            )

    def _check_target(self, target: torch.Tensor | None) -> None:
        if not self._loss_fn or not self._own[-1].is_last:
            return
        if target is None:
            if self._has_backward:
                raise UsageError("target=None on the rank of the last stage, which computes the loss; give target")
            return
        self._samples = len(target)
        if self._samples < self._n_microbatches:
            raise UsageError(self._too_small("target", self._samples))

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._numbers:
            self._prepare(arg_mbs, kwarg_mbs, target_mbs, loss_kwargs)
        return super()._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)

    def _prepare(self, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, loss_kwargs: Any) -> None:
        state = (self._token, self._numbers, self._has_backward)
        if all(getattr(stage, "_holmes_prepared", None) == state for stage in self._own):
            return
        for number in self._metas.missing(self._numbers, self._has_backward):
            chunk = self._numbers.index(number)
            self._infer(number, arg_mbs[chunk], kwarg_mbs[chunk], target_mbs and target_mbs[chunk], loss_kwargs)
        self._metas.prepare(self._numbers, self._has_backward)
        self._set_initialized(True, self._has_backward)
        for stage in self._own:
            stage._holmes_prepared = state

    def _infer(self, number: int, args: Any, kwargs: Any, target: Any, loss_kwargs: Any) -> None:
        """torch's exchange of metadata for one micro-batch. Example tensors hold for the first number only."""
        given = [stage._user_meta for stage in self._own]
        for stage in self._own:
            stage._stage_meta = _StageMeta()  # what it had is kept as it was
            if number > 0 or len(set(self._numbers)) > 1:
                stage._user_meta = _StageMeta()
        try:
            self._set_initialized(False, False)
            self._initialize(args, kwargs, target, loss_kwargs)
        finally:
            for stage, meta in zip(self._own, given, strict=True):
                stage._user_meta = meta
        self._metas.keep(number, self._has_backward)

    @property
    def _initialize(self) -> Callable[..., None]:
        several: Callable[..., None] | None = getattr(self, "_initialize_stages", None)
        return several or self._initialize_stage

    def _set_initialized(self, forward: bool, backward: bool) -> None:
        """In the names of torch's classes for one stage and for several."""
        self._stage_forward_initialized = self._stages_forward_initialized = forward
        self._stage_backward_initialized = self._stages_backward_initialized = backward

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: Any = None
    ) -> None:
        if target_mbs is not None:  # else an evaluation
            super()._maybe_compute_loss(stage, output, target_mbs, mb_index, loss_kwargs)

    def _compute_loss(self, output: Any, target: torch.Tensor, loss_kwargs: Any = None) -> torch.Tensor:
        """The value of the loss, the gradient of its share in that of the batch."""
        loss: torch.Tensor = super()._compute_loss(output, target, loss_kwargs)
        count, samples = self._n_microbatches, len(target)
        share = loss / count if samples * count == self._samples else loss * (samples / self._samples)
        return share + (loss - share).detach()
