"""CheckedStage: torch's stage with right numbers in every schedule, and a word where they cannot be right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage as TorchPipelineStage
from torch.distributed.pipelining.stage import _normalize_model_output_as_tuple
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holmes.training.pipeline.backward import divided_backward
from holmes_comm.errors import UsageError


class CheckedStage(TorchPipelineStage):
    """`torch.distributed.pipelining.PipelineStage` with what torch 2.13 loses (docs/upstream.md).

    Where a schedule divides backward passes (zb-h1), the gradients are those of a whole one, and hooks of parameters
    run. Metadata is inferred with zeros and leaves the module's buffers as they are.

    What a stage sends must be as the metadata says that both sides of the boundary have: ValueError, on this rank and
    before it leaves, where an output has another shape or dtype, or needs a gradient that the next stage will not send
    (parameters were unfrozen, or an example tensor does not require one).
    """

    #: Of micro-batches whose shapes are not all alike, by number; else empty.
    chunk_metas: Mapping[int, Any] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch."""
        self._use_meta(fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            self._check_outputs(fwd_chunk_id, _normalize_model_output_as_tuple(output))
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch."""
        self._use_meta(bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Of one micro-batch; zeros in the place of gradients that there are not."""
        self._use_meta(bwd_chunk_id)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Of one micro-batch: "full", or "input" and later "weight"."""
        if backward_type == "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        return divided_backward(self, backward_type, bwd_kwargs, last_backward)

    def _use_meta(self, chunk: int) -> None:
        self._stage_meta = self.chunk_metas.get(chunk, self._stage_meta)

    def _check_outputs(self, chunk: int, outputs: Sequence[torch.Tensor]) -> None:
        for index, (output, meta) in enumerate(zip(outputs, self._stage_meta.outputs or (), strict=True)):
            if not isinstance(output, DTensor) and (output.shape, output.dtype) != (meta.shape, meta.dtype):
                raise UsageError(
                    f"output {index} of stage {self.stage_index} is {output.dtype} of shape {list(output.shape)} in "
                    f"micro-batch {chunk}, but the next stage expects {meta.dtype} of shape {list(meta.shape)}; "
                    "sizes may change between the steps of holmes.pipeline_schedule, not of torch's schedules, and "
                    "with the first stage's inputs only; example tensors must be as a micro-batch is"
                )
            if self.has_backward and output.requires_grad and self.grad_recv_info[chunk][index].tensor_meta is None:
                raise UsageError(
                    f"output {index} of stage {self.stage_index} requires a gradient, but none is sent for it, as the "
                    "schedule began with one that required none; after a change of requires_grad make a new schedule "
                    "on every rank, and example tensors (output_args, input_args) with requires_grad=True"
                )

    def _forward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        module = self.submod
        unsynchronized = module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()
        with _unchanged_buffers(module), unsynchronized:
            return super()._forward_metadata_inference(*args, **kwargs)

    def _to_tensor(self, arg: Any) -> torch.Tensor:
        """What metadata is inferred with: zeros, which are valid indices too, instead of whatever is in memory."""
        made = super()._to_tensor(arg)
        return made if isinstance(arg, torch.Tensor) else made.detach().zero_().requires_grad_(made.requires_grad)

    def _compute_input_grads(self, outputs: Any, all_fwd_inputs: Any, grad_outputs: Any = None) -> Any:
        """To infer metadata. Gradients are as their tensors are: no backward pass, which checkpoints may refuse."""
        if any(isinstance(each, DTensor) for each in all_fwd_inputs):
            return super()._compute_input_grads(outputs, all_fwd_inputs, grad_outputs)
        return (None,) * len(all_fwd_inputs)


def checked(stage: TorchPipelineStage) -> TorchPipelineStage:
    """A stage of torch's own class, or of one derived from it, made a `CheckedStage` in place."""
    if not isinstance(stage, CheckedStage):
        cls = type(stage)
        stage.__class__ = CheckedStage if cls is TorchPipelineStage else type(cls.__name__, (cls, CheckedStage), {})
    return stage


@contextmanager
def _unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """A run of the module on made-up values leaves no trace, such as in the statistics of a batch norm."""
    kept = [
        (owner, name, buffer, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in kept:
                owner._buffers[name] = buffer
                buffer.copy_(value)
