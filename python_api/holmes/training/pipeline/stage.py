"""PipelineStage: torch's stage, whose receives are posted before they are due and whose sends nobody waits for, with
its boundaries in another dtype where asked for, so that fewer bytes cross the slow link."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from holmes.training.pipeline.checked import CheckedStage
from holmes_comm.errors import UsageError

#: Backends that match messages of host memory by tag and move them without the caller's help. Elsewhere (NCCL runs
#: messages in the order of the calls) the schedule's own order and waits are kept.
TAGGED_BACKENDS = ("holmes", "gloo")
#: Of messages between stages; torch's own exchanges of metadata use tag 0.
FIRST_TAG = 1


class WireCast(nn.Module):
    """`module` with floating-point inputs that arrive, and outputs that leave, in a wire dtype.

    Autograd casts the gradients on their way back, so both directions of a boundary use the dtype. Inputs are cast to
    the dtype of the module's first floating-point parameter (none: left as they come). Values that have the dtype
    already pass as they are. The wrapped module's parameters and their names are its own.
    """

    def __init__(self, module: nn.Module, takes: torch.dtype | None, gives: torch.dtype | None) -> None:
        super().__init__()
        check_wire_dtype(takes)
        check_wire_dtype(gives)
        self.module = module
        self._takes, self._gives = takes, gives

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Casts what arrives, runs the module, casts what leaves."""
        if self._takes is not None:
            args = _cast(args, compute_dtype(self.module))
        outputs = self.module(*args, **kwargs)
        return outputs if self._gives is None else _cast(outputs, self._gives)


def compute_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype of the first floating-point parameter; None where there is none."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


def check_wire_dtype(dtype: torch.dtype | None) -> None:
    """Raises ValueError where values could not be cast to it and back."""
    if dtype is not None and not dtype.is_floating_point:
        raise UsageError(f"wire dtype {dtype} must be a floating-point one, such as torch.bfloat16")


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    def cast(value: Any) -> Any:
        is_cast = dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_cast else value

    return tree_map(cast, values)


@dataclass(frozen=True)
class Wait:
    """Time in which a stage had nothing to compute with: `what` is "forward", "backward" or "sends"."""

    what: str
    start_s: float  # time.monotonic
    end_s: float


class PipelineStage(CheckedStage):
    """`torch.distributed.pipelining.PipelineStage` for links that are slow; takes its place in every torch schedule.

    All receives of a step are posted when it begins, into the buffers that torch made for its micro-batches, and are
    awaited by the computation that needs them; sends are awaited when the step ends. So a micro-batch crosses the link
    while others compute, in GPipe and 1F1B too, which wait for each message otherwise. No memory beyond torch's.
    Numbers and metadata are those of a `CheckedStage`.

    `input_wire_dtype`, `output_wire_dtype`: the dtype in which floating-point values (and their gradients) cross the
    boundary before and behind this stage, such as torch.bfloat16; None: as they are. Both sides of a boundary must be
    given the same (`pipeline_stages` does that from a plan). The rounding is that of a cast, once each way; with them
    example tensors (`input_args`, `output_args`) are of the wire dtype. Refused for modules wrapped by DDP or FSDP,
    which torch's stage must see: use DistributedOptimizer, or leave it off.

    `posts_ahead=False`: messages as torch's stage orders and awaits them, for comparison.
    `waits`: what the last step waited for, in order (not what torch's schedules await themselves). Constructed and used
    as torch's stage (the first `step` is collective over the group). A lost peer raises the backend's named error in
    `step`. Not thread-safe.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str = "cpu",
        *args: Any,
        input_wire_dtype: torch.dtype | None = None,
        output_wire_dtype: torch.dtype | None = None,
        posts_ahead: bool = True,
        **kwargs: Any,
    ) -> None:
        takes = input_wire_dtype if stage_index > 0 else None
        gives = output_wire_dtype if stage_index < num_stages - 1 else None
        if takes is not None or gives is not None:
            if isinstance(submodule, DistributedDataParallel | FSDPModule):
                raise UsageError(
                    f"stage {stage_index} is wrapped by {type(submodule).__name__}, which torch's stage must see, so "
                    "its boundaries cannot have a wire dtype; use holmes.DistributedOptimizer instead of the wrapper, "
                    "or no wire dtype"
                )
            submodule = WireCast(submodule, takes, gives)
        super().__init__(submodule, stage_index, num_stages, torch.device(device), *args, **kwargs)
        self.waits: list[Wait] = []
        #: Whether receives are posted when a step begins; never on a GPU, where a stage's messages may be NCCL's.
        is_tagged = dist.get_backend(self.group) in TAGGED_BACKENDS and self.device.type == "cpu"
        self.posts_ahead = posts_ahead and is_tagged
        self._receives: dict[tuple[str, int], list[dist.Work]] = {}
        self._sends: list[dist.Work] = []
        self._posted: set[str] = set()  # "forward", "backward": directions whose receives of this step are posted

    def clear_runtime_states(self) -> None:
        """A step begins."""
        self._wait_for_sends()
        self._receives.clear()
        self._posted.clear()
        self.waits.clear()
        super().clear_runtime_states()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Nothing is left to the schedule: posts the receives of all micro-batches."""
        return self._post("forward", fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Nothing is left to the schedule: posts the receives of all micro-batches."""
        return self._post("backward", bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Nothing is left to the schedule: starts the sends."""
        return self._send("forward", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Nothing is left to the schedule: starts the sends."""
        return self._send("backward", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def await_input(self, direction: str, chunk: int) -> None:
        """Blocks until what "forward" or "backward" of a micro-batch needs is there; at once where it is."""
        self._wait(direction, self._receives.pop((direction, chunk), []))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Computes as soon as the input is there."""
        self.await_input("forward", fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Computes as soon as the gradient is there."""
        self.await_input("backward", bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """A step ends: nothing of it is left under way."""
        self._wait_for_sends()
        super().perform_reduce_grad(grad_scale_factor)

    def _ops(self, direction: str, chunk: int) -> list[dist.P2POp]:
        receive = super().get_fwd_recv_ops if direction == "forward" else super().get_bwd_recv_ops
        return receive(chunk)

    def _post(self, direction: str, chunk: int) -> list[dist.P2POp]:
        if not self.posts_ahead:
            return self._ops(direction, chunk)
        if direction not in self._posted:
            self._posted.add(direction)
            source = self.stage_index + (-1 if direction == "forward" else 1)
            for each in range(len(self.args_recv_info)):
                tag = self._tag(source, direction, each)
                works = [
                    dist.irecv(op.tensor, group=op.group, group_src=op.group_peer, tag=tag)
                    for op in self._ops(direction, each)
                ]
                self._receives[direction, each] = [work for work in works if work is not None]
        return []

    def _tag(self, source_stage: int, direction: str, chunk: int) -> int:
        """One for each micro-batch: schedules send them in other orders than that in which they are awaited."""
        return FIRST_TAG + 2 * (chunk * self.num_stages + source_stage) + (direction == "backward")

    def _send(self, direction: str, chunk: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if not self.posts_ahead:
            return ops
        tag = self._tag(self.stage_index, direction, chunk)
        for op in ops:
            work = dist.isend(op.tensor, group=op.group, group_dst=op.group_peer, tag=tag)
            if work is not None:
                self._sends.append(work)
        return []

    def _wait(self, what: str, works: list[dist.Work]) -> None:
        if not works:
            return
        start = time.monotonic()
        for work in works:
            work.wait()
        self.waits.append(Wait(what, start, time.monotonic()))

    def _wait_for_sends(self) -> None:
        works, self._sends = self._sends, []
        self._wait("sends", works)

    def waited_s(self) -> dict[str, float]:
        """Seconds of the last step by what they were waited for."""
        total: dict[str, float] = defaultdict(float)
        for wait in self.waits:
            total[wait.what] += wait.end_s - wait.start_s
        return dict(total)
