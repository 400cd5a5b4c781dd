"""DistributedOptimizer: any element-wise torch optimizer, sharded over a data-parallel group, hidden behind compute."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

import holmes_comm
from holmes.training.arguments import above_zero, finite_above_zero, floating_dtype, process_group, whole
from holmes.training.overlap.agreement import broadcast_model, check_equal_models
from holmes.training.overlap.checkpoint import (
    StateElsewhere,
    apply_settings,
    as_loaded_by,
    check_settings,
    decode_settings,
    encode_settings,
    from_plain,
    is_plain,
    load_state_tensors,
    state_tensors,
)
from holmes.training.overlap.clipping import ClippedStep
from holmes.training.overlap.elementwise import check_elementwise, settings_kind
from holmes.training.overlap.hooks import ModelHooks, has_optimizer, listen_to_compiler
from holmes.training.overlap.link import bucket_bytes_for, small_step
from holmes.training.overlap.loss_scale import LossScale
from holmes.training.overlap.parameters import (
    as_groups,
    as_modules,
    check_embeddings,
    parameter_places,
    trained_parameters,
    warn_of_left_out,
    warn_of_shared_memory,
    without_frozen,
)
from holmes.training.overlap.pending import PendingState
from holmes.training.overlap.report import StepReport, make_report
from holmes.training.overlap.runtime import Runtime, make_layout
from holmes.training.overlap.schedule import BucketTimes, StepObserver, gather_order
from holmes.training.overlap.sent import SentGradient, SpentGradient
from holmes.training.overlap.shards import with_fused
from holmes.training.overlap.timeline import Timeline
from holmes.training.overlap.transfers import (
    ALL_GATHER,
    REDUCE_SCATTER,
    Lane,
    Transfer,
    give_back_group,
    ranks_of,
    take_group,
)
from holmes.training.overlap.unsent import UnsentGradients
from holmes.training.overlap.usage import UsageRecord, agree, find_needs, first_uses
from holmes.training.process_groups import planned_weight
from holmes_comm.errors import UsageError

_log = logging.getLogger(__name__)


class DistributedOptimizer(torch.optim.Optimizer):
    """`optimizer_class` over `model`, its state sharded over `group` (ZeRO-1). A torch.optim.Optimizer to schedulers.

    Args:
        model: the module (or, in an interleaved pipeline, the modules) that this rank trains; equal on all ranks of
            `group`. Its parameters become views of flat buffers with the first step.
        optimizer_class: an element-wise torch optimizer; further keyword arguments (lr=...) are its own.
        params: what torch optimizers take: parameters, or groups of them with their own settings. None: all of `model`.
        group: the data-parallel group; None: the default group, or none where torch.distributed is not initialised.
        gather_group: the group of the all-gathers, of the same ranks in the same order; None: one made like `group`.
        max_grad_norm: clips by the global norm; then shards step only after every reduce-scatter.
        norm_groups: the tensor- and pipeline-parallel groups over which that norm (and an overflow) counts too.
        is_replicated: whether a parameter (name, tensor) is equal on all ranks of the first norm group: it counts once.
        loss_scale: "dynamic" or a number; multiply the loss by it: `optimizer.scale(loss).backward()`.
        reduce_dtype: dtype in which gradients accumulate and are reduced; None: each parameter's own.
        bucket_bytes: size of a bucket; None: from the measured link (docs/optimizer.md).
        step_in_backward: shards step as soon as their gradients are reduced, during the backward pass, which nobody
            sees before `step`; it takes a second copy of the shard's state (docs/optimizer.md). Not on GPUs, and not
            with max_grad_norm or loss_scale, which need all gradients first: shards step in `step`, as with False.
        accumulation_steps: backward passes between two steps where that number changes; None: as many as the first step
            had.
        compress_gradients: "bf16", "int8" or "int4": how gradients cross between clusters, with error feedback; None:
            as they are. They are reduced in float32, on the processor, over the backend holmes (docs/optimizer.md).
        compress_parameters: the same of parameters, which are float32: what has changed since the step before crosses.
        gradient_weight: what this rank's gradients count in the mean over `group`, where ranks had different numbers of
            samples: samples * ranks / all samples, which sum to the number of ranks. None: the share of a plan whose
            `process_groups` made `group` (`plan.gradient_weight(rank)`), else 1.
        name_of: name in `model` -> name in checkpoints, where several pipeline stages use equal names.

    Every rank of `group` calls it and its methods in the same order (collective), where not said otherwise. Not
    thread-safe. Raises ValueError or TypeError on arguments that do not fit, and what the group's backend raises.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        params: Any = None,
        group: dist.ProcessGroup | None = None,
        gather_group: dist.ProcessGroup | None = None,
        max_grad_norm: float | None = None,
        norm_groups: Sequence[dist.ProcessGroup] = (),
        is_replicated: Callable[[str, nn.Parameter], bool] | None = None,
        loss_scale: float | Literal["dynamic"] | None = None,
        reduce_dtype: torch.dtype | None = None,
        bucket_bytes: int | None = None,
        step_in_backward: bool = True,
        accumulation_steps: int | None = None,
        compress_gradients: str | None = None,
        compress_parameters: str | None = None,
        gradient_weight: float | None = None,
        name_of: Callable[[str], str] | None = None,
        **arguments: Any,
    ) -> None:
        self._is_ready = False
        self._is_closed = False
        if not isinstance(optimizer_class, type):
            kind = type(optimizer_class).__name__
            raise UsageError(f"optimizer_class is a {kind} that was made; give the class, and its arguments by name")
        named = {"group": group, "gather_group": gather_group}
        named |= {f"norm_groups[{index}]": each for index, each in enumerate(norm_groups)}
        for name, each in named.items():
            if each is not None:
                process_group(name, each)
        self._reduce_dtype = None if reduce_dtype is None else floating_dtype("reduce_dtype", reduce_dtype)
        self._bucket_bytes = None if bucket_bytes is None else whole("bucket_bytes", bucket_bytes)
        self._accumulation_steps: int | None = None
        if accumulation_steps is not None:
            self._accumulation_steps = whole("accumulation_steps", accumulation_steps)
        if max_grad_norm is not None:
            max_grad_norm = above_zero("max_grad_norm", max_grad_norm, "; None clips nothing")
        weight = planned_weight(group) if gradient_weight is None else gradient_weight
        self._gradient_weight = finite_above_zero("gradient_weight", weight, "; None takes the plan's")
        self._loss_scale = None if loss_scale is None else LossScale(loss_scale)
        self._modules = as_modules(model)
        given = as_groups(self._modules, params)
        groups = without_frozen(given)
        self._trained = trained_parameters(self._modules, groups, name_of)
        self._index_of = {id(t.tensor): index for index, t in enumerate(self._trained)}
        name_by_id = {id(t.tensor): t.name for t in self._trained}
        self._given_names = [[name_by_id.get(id(p)) for p in group["params"]] for group in given]  # None: frozen
        self._untrained = [(n, p) for m in self._modules for n, p in m.named_parameters() if not p.requires_grad]
        self._optimizer_class = optimizer_class
        self._given_arguments = arguments
        self._arguments = with_fused(optimizer_class, arguments, [t.tensor for t in self._trained])
        template = optimizer_class(groups, **self._arguments)
        self._tried: set[str] = set()
        can_undo = self._try_settings(template.param_groups)
        super().__init__(template.param_groups, template.defaults)
        self.state = self._no_state = StateElsewhere()
        self._given_group = group
        self._is_alone = group is None and not dist.is_initialized()
        self._taken_groups: list[dist.ProcessGroup] = []
        self._reduce_lane, self._gather_lane = self._make_lanes(group, gather_group)
        self._compress(compress_gradients, compress_parameters)
        if self._reduce_lane.size > 1:
            check_embeddings(self._modules, self._trained)
        check_equal_models(self._reduce_lane, self._trained, self._gradient_weight)
        broadcast_model(self._reduce_lane, self._modules)
        self._clipped: ClippedStep | None = None
        if max_grad_norm is not None or loss_scale is not None:
            self._clipped = ClippedStep(
                self._reduce_lane, self._trained, max_grad_norm, norm_groups, is_replicated, self._loss_scale
            )
        # One lane would have to carry both kinds in one order; a GPU's streams wait by themselves.
        has_background = self._gather_lane is not self._reduce_lane and self._device.type == "cpu"
        self._step_in_backward = step_in_backward and self._clipped is None and has_background and can_undo
        self.grad_norm: float | None = None  # of the last step, before clipping; None without max_grad_norm and scaling
        self.last_report: StepReport | None = None
        self.timeline = Timeline()
        self._steps = 0
        self._step_ended_s = time.monotonic()
        self._is_holding = False  # inside no_sync
        self._observer: StepObserver | None = None  # until the order of the all-gathers is fixed
        self._record = UsageRecord()
        self._recorded_accumulation = self._accumulation_steps or 1
        self._runtime: Runtime | None = None
        self._pending: PendingState | None = None  # state before the first step
        self._hooks = ModelHooks(self._modules, self._trained, self, self.timeline)
        self._unsent = UnsentGradients(self._trained)
        self._hidden: list[tuple[nn.Parameter, SentGradient]] = []  # while something is compiled
        self._watched_task = -1  # autograd's pass at whose end `_on_backward_end` is called
        self._places = parameter_places(self._modules, self._index_of)
        self._members = _members_of(self.param_groups)
        self._is_ready = True

    def _make_lanes(self, group: dist.ProcessGroup | None, gather_group: dist.ProcessGroup | None) -> tuple[Lane, Lane]:
        """Collective. For the reduce-scatters and all-gathers, both of groups of their own: what others send over
        `group` may come in between at another place on each rank. On a GPU one for both: one order for both.
        """
        given = Lane(group)
        if gather_group is not None and (ranks := ranks_of(gather_group)) != ranks_of(group):
            raise ValueError(f"gather_group has ranks {ranks}, but group has {ranks_of(group)}; give one of the same")
        if given.size == 1:
            return given, given
        own = self._take_group(group, given.label)
        reduce_lane = Lane(own, given.label) if own is not None else given
        if gather_group is None and own is not None and self._device.type == "cpu":
            gather_group = self._take_group(group, f"{given.label} gather")
        return reduce_lane, reduce_lane if gather_group is None else Lane(gather_group)

    def _compress(self, gradients: str | None, parameters: str | None) -> None:
        for argument, codec, lane, kind, own_dtype in (
            ("compress_gradients", gradients, self._reduce_lane, REDUCE_SCATTER, self._reduce_dtype),
            ("compress_parameters", parameters, self._gather_lane, ALL_GATHER, None),
        ):
            if codec is None:
                continue
            holmes_comm.Compression(codec)  # raises for what is none
            dtypes = {own_dtype or trained.tensor.dtype for trained in self._trained}
            if dtypes != {torch.float32} or self._device.type != "cpu":
                words = ", ".join(sorted(f"{dtype}".removeprefix("torch.") for dtype in dtypes))
                advice = "give reduce_dtype=torch.float32, or leave it out"
                raise UsageError(
                    f"{argument}={codec!r} is for float32 on the processor, and here it is {words} on {self._device}; "
                    + (advice if kind == REDUCE_SCATTER and self._device.type == "cpu" else "leave it out")
                )
            if lane.size > 1 and (backend := dist.get_backend(lane.group)) != "holmes":
                raise UsageError(f"{argument}={codec!r} is for the backend holmes, not for {backend!r}; leave it out")
            lane.compress(kind, codec)

    def _take_group(self, group: dist.ProcessGroup | None, label: str) -> dist.ProcessGroup | None:
        taken = take_group(group, label, self._device)
        if taken is not None:
            self._taken_groups.append(taken)
        return taken

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Refuses to be copied or pickled."""
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled: it holds process groups and its model's memory. Save "
            "optimizer.state_dict(), and make a new optimizer for a copied model"
        )

    # --- a step ---

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Collective. Ends the step: every shard is stepped when it returns, the all-gathers are under way.

        A step whose gradients overflowed changes no parameter (see `loss_scale`, `grad_norm`). Returns the closure's
        result. Raises what a failed collective raises.
        """
        self._check_open()
        self._refuse_scaler()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        runtime = self._runtime or self._lay_out()
        if runtime is None:
            return loss  # no gradient has ever come: torch's optimizers do nothing then
        self._take_pending(runtime)
        listen_to_compiler()
        if not self._begin_step(runtime):
            return loss
        if self._clipped is None:
            runtime.step_rest()
        else:
            try:
                self.grad_norm = self._clipped.step(runtime, self._steps)
            except FloatingPointError:
                runtime.forget()
                raise
        reduced = list(runtime.reducer.transfers)
        runtime.end_step()
        self._unsent.forget()
        self._steps += 1
        ended = self._report()
        if self._observer is not None:
            self._observer.observe(reduced, [row for _, rows in ended for row in rows])
            if self._observer.is_full:
                self._fix_gather_order(runtime, self._observer)
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, also those with which the last step was made. They become None, or zeros if not
        `set_to_none` (those that there are): a parameter without gradients in the next step is stepped with these.

        Collective after a backward pass, to be called on all ranks then; nothing of that pass is left. Where others
        call `step`, theirs raises a RuntimeError that names this rank, and changes nothing.
        """
        self._check_open()
        self._unsent.forget()
        if self._runtime is None:
            self._record.forget_gradients()
            super().zero_grad(set_to_none)
            return
        zeroed = [] if set_to_none else [t.tensor for t in self._trained if t.tensor.grad is not None]
        if self._runtime.reducer.has_counted:
            self._runtime.finish_backward(self._steps, drops=True)
        else:
            self._runtime.reducer.reset()
        for parameter in zeroed:
            parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale: call backward on that. Local."""
        return loss if self._loss_scale is None else loss * self._loss_scale.value

    @property
    def loss_scale(self) -> float:
        """The current factor; 1 without loss scaling."""
        return 1.0 if self._loss_scale is None else self._loss_scale.value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Local. Gradients of backward passes inside accumulate and are not sent."""
        before, self._is_holding = self._is_holding, True
        try:
            yield
        finally:
            self._is_holding = before

    @property
    def accumulation_steps(self) -> int | None:
        """Backward passes between two steps; None: as many as the first step had. Set it between steps only."""
        return self._accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, count: int) -> None:
        if self._runtime is not None and not self._runtime.reducer.is_idle:
            raise RuntimeError("accumulation_steps changes between a backward pass and its step; set it after step")
        count = self._accumulation_steps = whole("accumulation_steps", count)
        if self._runtime is None:
            self._recorded_accumulation = count
        else:
            self._runtime.reducer.expected = self._expected()

    @property
    def process_groups(self) -> tuple[dist.ProcessGroup | None, ...]:
        """The group of the reduce-scatters and, where it is another, of the all-gathers; none where nothing is sent."""
        lanes = {id(lane): lane for lane in (self._reduce_lane, self._gather_lane)}.values()
        return tuple(lane.group for lane in lanes if lane.size > 1)

    def synchronize(self) -> None:
        """Local. Waits until every parameter is there. Whoever uses a parameter waits for it anyway; this is for what
        shares memory with one without being one (a view, an address)."""
        if self._runtime is not None:
            self._runtime.gatherer.wait_all()

    def close(self) -> None:
        """Waits for every parameter and lets go of the model, which another optimizer may then take. Its groups are
        kept for the next optimizer of its group: close and make optimizers in the same order on all ranks.
        """
        self.synchronize()
        self._is_closed = True
        self._hooks.remove()
        is_idle = self._runtime is None or self._runtime.reducer.is_idle
        if self._runtime is not None:
            self._runtime.close()
        for group in self._taken_groups:
            if is_idle:
                give_back_group(self._given_group, group)
            else:  # with reduce-scatters under way that nobody will wait for
                dist.destroy_process_group(group)
        self._taken_groups.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only the constructor adds groups: the layout is fixed. Raises ValueError afterwards."""
        if self._is_ready:
            raise ValueError("a DistributedOptimizer takes no further parameters; give them all to its constructor")
        super().add_param_group(param_group)

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Local. For torch.distributed.checkpoint, which loads it on any layout.

        {"state": name -> key -> FlatShard or number, "settings": JSON}; shares memory with the optimizer. State dict
        hooks run as torch's.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        if self._runtime is not None:
            self._runtime.undo_early()
        state = self._own_state()
        scale = None if self._loss_scale is None else self._loss_scale.state_dict()
        extra = {"steps": self._steps, "loss_scale": scale, "optimizer": self._optimizer_class.__name__}
        settings = encode_settings(self.param_groups, extra)
        state_dict: dict[str, Any] = {"state": state, "settings": settings}
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = after(self, state_dict) or state_dict
        return state_dict

    def _own_state(self) -> dict[str, dict[str, Any]]:
        if self._runtime is not None:
            return state_tensors(self._runtime.shards, self._trained)
        return self._make_pending().state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Local. The inverse. Also takes, on every rank, the whole state of a plain `optimizer_class` over the same
        parameters in the same groups (of a training with DDP). Raises ValueError where a part is missing, or belongs to
        another layout or optimizer, or where it is no such state; nothing is changed then.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self._load(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        if self._runtime is not None:
            self._runtime.undo_early()
        if is_plain(state_dict):
            state_dict = from_plain(state_dict, self._own_state(), self._given_names)
        saved = decode_settings(state_dict, self.param_groups)
        rows = as_loaded_by(self._optimizer_class, self._arguments, saved["groups"])
        if not int(saved["steps"]):  # saved before the first step: there was no state yet
            self._pending = None
            if self._runtime is not None:
                for shard in self._runtime.shards:
                    shard.forget_state()
        else:
            check_settings(self._optimizer_class, self._arguments, saved, rows, self.param_groups)
            with torch.no_grad():
                if self._runtime is not None:
                    load_state_tensors(self._runtime.shards, self._trained, state_dict["state"])
                    self._pending = None
                else:
                    self._make_pending().load(state_dict["state"])
        apply_settings(rows, self.param_groups)
        self._steps = int(saved["steps"])
        if self._loss_scale is not None and saved["loss_scale"] is not None:
            self._loss_scale.load_state_dict(saved["loss_scale"])

    # --- reports ---

    @contextmanager
    def tracing(self, path: str | Path) -> Iterator[None]:
        """Local. Writes the steps that end inside as a Chrome trace with compute, exposed and communication lanes."""
        self.timeline.is_recording = True
        try:
            yield
        finally:
            self.timeline.is_recording = False
            self.timeline.save(path, dist.get_rank() if dist.is_initialized() else 0)

    def _report(self) -> list[tuple[Lane, list[tuple[Transfer, float]]]]:
        now = time.monotonic()
        lanes = {id(lane): lane for lane in (self._reduce_lane, self._gather_lane)}.values()
        ended = [(lane, lane.collect()) for lane in lanes]
        self.last_report = make_report(self._steps, now - self._step_ended_s, ended)
        self.timeline.close_open()
        self.timeline.add("steps", f"step {self._steps}", self._step_ended_s, now)
        for lane, transfers in ended:
            self.timeline.add_transfers(lane, transfers)
        self._step_ended_s = now
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s", self.last_report.summary())
        return ended

    # --- inside ---

    @property
    def _device(self) -> torch.device:
        return self._trained[0].tensor.device

    def on_gradient(self, index: int) -> None:
        """For the model's hooks: parameter `index` has accumulated a gradient."""
        self.timeline.extend("compute", "backward")
        self._watch_pass()
        if self._runtime is None:
            if not self._is_holding:
                self._record.saw_gradient(index)
            return
        runtime = self._runtime
        if isinstance(self._trained[index].tensor.grad, SpentGradient):
            return  # will be dropped, or refused by `step`
        if runtime.reducer.is_sent(index):  # its .grad was set to None since, or this would have been an error
            parameter = self._trained[index].tensor
            gradient = parameter.grad
            runtime.finish_backward(self._steps, drops=True)
            parameter.grad = gradient
        runtime.reducer.on_gradient(index, is_counted=not self._is_holding)
        runtime.step_arrived()

    def _watch_pass(self) -> None:
        """Has `_on_backward_end` called at the end of the backward pass that runs."""
        task = torch._C._current_graph_task_id()
        if task != self._watched_task:
            self._watched_task = task
            self._unsent.begin_pass()
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def on_forward(self, module: nn.Module) -> None:
        """For the model's hooks: the forward of `module` begins."""
        self._unsent.look_once()
        if self._runtime is None:
            self._record.saw_module(module)
        else:
            self._runtime.before_forward(module)

    def on_transform(self) -> None:
        """For the model's hooks: what is transformed must not see parameters that are awaited."""
        self.synchronize()

    def on_clip(self, parameters: Sequence[torch.Tensor]) -> None:
        """For the model's hooks: a norm of this rank's own gradients is none of the mean's."""
        own = [self._index_of[id(each)] for each in parameters if id(each) in self._index_of]
        if own and self._reduce_lane.size > 1 and not self._is_closed:
            raise RuntimeError(
                f"the gradients of {self._trained[min(own)].name!r} and others are this rank's own: clipped by their "
                "norm here, the mean over the ranks would not be the clipped mean. Clip with max_grad_norm= (its norm "
                "is optimizer.grad_norm)"
            )

    def on_fork(self) -> None:
        """For the model's hooks: a child cannot wait for what is on its way here."""
        self.synchronize()

    def on_compile(self) -> None:
        """For the model's hooks: what is traced must not see them either, nor what stands for gradients."""
        self.synchronize()
        for parameter in (t.tensor for t in self._trained):
            if isinstance(parameter.grad, SentGradient):
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def on_compiled(self) -> None:
        """For the model's hooks: that has ended."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()

    def _on_backward_end(self) -> None:
        self._watched_task = -1
        if self._runtime is None:
            self._unsent.note(range(len(self._trained)))
            return
        self._runtime.reducer.flush()
        self._runtime.step_arrived()
        self._unsent.note(self._runtime.reducer.unsent)

    def _begin_step(self, runtime: Runtime) -> bool:
        """Collective. Ends the backward pass; whether there is something to step with. What is wrong on this rank is
        raised here after the others were told."""
        try:
            self._check_model()
            is_cleared = self._check_gradients(runtime)
            runtime.reducer.flush()
        except Exception:
            with suppress(Exception):  # of a dead group, say: the first error is the one to know
                runtime.finish_backward(self._steps, drops=True)
            raise
        return runtime.finish_backward(self._steps, drops=is_cleared)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """To GradScaler: that it hands its scale to `step` and does not unscale gradients, which nothing would show."""
        return self._reduce_lane.size > 1

    def _refuse_scaler(self) -> None:
        """Raises RuntimeError where a GradScaler has called `step`."""
        if hasattr(self, "found_inf") and self._reduce_lane.size > 1:
            for name in ("grad_scale", "found_inf"):  # as it does itself after a step
                delattr(self, name)
            raise RuntimeError(
                "a GradScaler stepped this optimizer: it looks for overflow in this rank's own gradients, so ranks "
                "would skip different steps. Scale the loss with loss_scale= ('dynamic' follows GradScaler's rule) and "
                "optimizer.scale(loss).backward(), and call optimizer.step()"
            )

    def _check_gradients(self, runtime: Runtime) -> bool:
        """Whether all gradients were set to None since they came. Raises RuntimeError where some that were sent were,
        or set to something else, or are those of the last step."""
        if runtime.reducer.is_cleared:
            return True
        spent = runtime.reducer.spent
        if spent:
            raise RuntimeError(
                f"parameter {self._trained[spent[0]].name!r} still has the gradient with which the last step was made "
                "(torch would step with it again, and add new gradients to it); it is not kept here: call zero_grad() "
                "before the next backward pass, and step() once for each"
            )
        changed = self._unsent.changed() if self._reduce_lane.size > 1 else ()
        if changed:
            raise RuntimeError(
                f"the gradient of parameter {self._trained[min(changed)].name!r} was changed between backward and "
                "step, before it was sent: what changed is this rank's own, which the mean over the ranks hides. Clip "
                "with max_grad_norm=, scale the loss (a schedule of torch's pipelining: scale_grads=False), or change "
                "gradients in parameter.register_post_accumulate_grad_hook; zero_grad() drops them"
            )
        cleared, replaced = runtime.reducer.disturbed()
        if replaced or cleared:
            what = "set" if replaced else "set to None"
            raise RuntimeError(
                f".grad of parameter {self._trained[(replaced or cleared)[0]].name!r} was {what} between backward and "
                "step, but the gradient has been sent to the other ranks already. Change gradients in "
                "parameter.register_post_accumulate_grad_hook, or drop all of them with zero_grad()"
            )
        return False

    def _fix_gather_order(self, runtime: Runtime, observer: StepObserver) -> None:
        """Collective. Plans with the slowest rank's compute and the collectives' own time, without waits for ranks."""
        rows = [[t.ready_ns, -t.reduce_ns, -t.gather_ns] for t in observer.times()]
        agreed = agree(self._reduce_lane.group, rows, self._device)
        times = [BucketTimes(ready, -reduce, -gather) for ready, reduce, gather in agreed]
        runtime.gatherer.order = gather_order(times, runtime.layout.forward_order)
        self._observer = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this DistributedOptimizer was closed; make a new one for the model")
        if self._is_alone and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                "this DistributedOptimizer was made before init_process_group, so it trains alone on each of the "
                f"{dist.get_world_size()} ranks; make it afterwards"
            )

    def _check_model(self) -> None:
        """Raises RuntimeError where the model's parameters, or the state beside them, are no longer what this steps."""
        for name, parameter in self._untrained:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was frozen when the optimizer was made, and is trained now: make a new "
                    "optimizer"
                )
        if self.state is not self._no_state:
            raise StateElsewhere.error("replaced")
        self._try_settings(self.param_groups)
        if _members_of(self.param_groups) != self._members:
            raise RuntimeError(
                "optimizer.param_groups has other groups or parameters than it was made with: the layout is fixed. Set "
                "lr and other settings in the groups that are there; to leave a parameter out, give it lr 0 in a group "
                "of its own or close() this optimizer and make a new one"
            )
        for module, attribute, tensor, name in self._places:
            if module._parameters.get(attribute, tensor) is not tensor and not self._still_has(tensor):
                raise RuntimeError(
                    f"parameter {name!r} of the model is another tensor now than the one this optimizer was made for, "
                    "which it steps without effect (load_state_dict(assign=True) and assignments of nn.Parameter do "
                    "that); load without assign, or close() this optimizer and make a new one"
                )

    def _try_settings(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether steps can be undone with the settings of each group that are of a kind not tried so far. Raises
        ValueError as check_elementwise."""
        can_undo = True
        for group in groups:
            kind = settings_kind(group)
            if kind not in self._tried:
                can_undo &= check_elementwise(self._optimizer_class, self._given_arguments, group)
                self._tried.add(kind)
        return can_undo

    def _still_has(self, tensor: nn.Parameter) -> bool:
        return any(tensor is each for module in self._modules for each in module.parameters())

    def _expected(self) -> list[int]:
        now = self._accumulation_steps or self._recorded_accumulation
        counts = self._record.usual_counts(len(self._trained), self._recorded_accumulation)
        return [count * now // self._recorded_accumulation for count in counts]

    def _make_pending(self) -> PendingState:
        if self._pending is None:
            self._pending = PendingState(
                self._reduce_lane, self._trained, self._optimizer_class, self._arguments, self.param_groups
            )
        return self._pending

    def _lay_out(self) -> Runtime | None:
        """Collective. Makes the buckets from what the first step showed; None where no rank has any gradient."""
        count = len(self._trained)
        record = self._record
        passes = len(record.passes)
        if self._accumulation_steps is None:
            self._recorded_accumulation = record.usual_count()
        elif passes % self._accumulation_steps:
            self._recorded_accumulation = passes  # a window that was shorter than those to come
        places = record.gradient_places(count, self._recorded_accumulation)
        needs = find_needs(self._modules, self._index_of, record)
        has_gradient = [int(t.tensor.grad is not None) for t in self._trained]
        rows = [places, first_uses(needs, record, count), has_gradient]
        places, uses, has_gradient = agree(self._reduce_lane.group, rows, self._device)
        if not any(has_gradient):
            return None
        warn_of_shared_memory(self._trained)
        if self._reduce_lane.size > 1:
            warn_of_left_out(self._modules, has_optimizer)
        if self._bucket_bytes is None:
            total_bytes = sum(t.tensor.numel() * t.tensor.itemsize for t in self._trained)
            self._bucket_bytes = bucket_bytes_for(
                self._reduce_lane,
                total_bytes,
                self._device,
                small_step(self._optimizer_class, self._arguments, self.param_groups, self._device),
            )
        layout = make_layout(
            self._trained, places, uses, self._expected(), needs, self._bucket_bytes, self._reduce_lane.size
        )
        self._reduce_lane.forget()
        self._gather_lane.forget()
        self._runtime = Runtime(
            layout,
            self._trained,
            (self._reduce_lane, self._gather_lane),
            self._reduce_dtype,
            (self._optimizer_class, self._arguments, self.param_groups),
            self.timeline,
            is_early=self._step_in_backward,
            gradient_weight=self._gradient_weight,
            names=self.defaults.keys(),
        )
        weakref.finalize(self, self._runtime.stop)
        if self._step_in_backward:
            self._observer = StepObserver(len(layout.buckets))
        return self._runtime

    def _take_pending(self, runtime: Runtime) -> None:
        """Collective in the first step, and in each one until a state is loaded that can be taken: raises ValueError
        where this one cannot."""
        if self._pending is not None and self._pending.is_loaded:
            self._pending.distribute(runtime.shards, self._steps)
        self._pending = None


def _members_of(groups: Sequence[Mapping[str, Any]]) -> tuple[int, list[list[int]]]:
    """Which list of groups it is, and which parameters are in each."""
    return id(groups), [[id(parameter) for parameter in group["params"]] for group in groups]
