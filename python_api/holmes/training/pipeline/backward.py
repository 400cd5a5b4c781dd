"""A backward pass in two: gradients of a stage's inputs first, those of its parameters when the schedule has time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from holmes.training.pipeline.graph import Group, children_of, groups_of
from holmes_comm.errors import UsageError

#: Refuses to compute the gradients of some tensors only: torch.utils.checkpoint with use_reentrant=True.
_INDIVISIBLE = "CheckpointFunctionBackward"

Gradients = tuple[torch.Tensor | None, ...]

#: Where a backward pass begins: a stage of torch 2.15 that has sent an output keeps its gradient edge only, and
#: nothing where it needs no gradient.
Root = torch.Tensor | GradientEdge | None


class WeightPass:
    """The gradients of parameters that a backward pass has left out."""

    def __init__(self, edges: list[GradientEdge], gradients: list[torch.Tensor], groups: list[Group]) -> None:
        self._edges, self._gradients, self.groups = edges, gradients, groups
        self.saved: dict[Node, Gradients] = {}  # what reached the nodes of groups

    def run(self) -> None:
        """Once. Accumulates as backward() does, with the hooks of parameters; those of activations have run before."""
        groups, self.groups = self.groups, []
        for group in sorted(groups, key=lambda group: -len(group.nodes)):  # those whose ways are run again, while kept
            self._run(group)
        self._edges, self._gradients = [], []
        self.saved.clear()

    def _run(self, group: Group) -> None:
        seeds = [(self._edges[head], self._gradients[head]) for head in group.heads]
        handles = []
        for node in group.nodes:
            saved = self.saved.pop(node, ())
            seeds += [(GradientEdge(node, i), value) for i, value in enumerate(saved) if value is not None]
            # Hooks, and what other nodes of the group send here on the way to an input, are in `saved` already.
            handles.append(node.register_prehook(lambda _, saved=saved: saved))
        try:
            if seeds:
                torch.autograd.backward(
                    [edge for edge, _ in seeds],
                    [value for _, value in seeds],
                    inputs=[leaf.variable for leaf in group.leaves],  # type: ignore[attr-defined]
                    retain_graph=len(group.nodes) > 1,
                )
        finally:
            for handle in handles:
                handle.remove()


def backward_inputs(
    outputs: Sequence[Root], gradients: Sequence[torch.Tensor | None] | None, inputs: Sequence[Any]
) -> tuple[Gradients, WeightPass]:
    """The gradients of `inputs`, None for those that need none, and what is left to do for the parameters.

    `gradients`: of the `outputs`; None: they are a loss, as tensors. An output without a gradient is left out. Both
    passes together are `torch.autograd.backward(outputs, gradients)`, also where no input needs a gradient, where
    parameters do not lie beside the way to an input, and where layers share them. A graph that cannot be divided
    (reentrant checkpointing) is run as a whole here.
    """
    given = map(torch.ones_like, outputs) if gradients is None else gradients  # type: ignore[arg-type]
    found_edges = [(_edge_of(output), gradient) for output, gradient in zip(outputs, given, strict=True)]
    pairs = [(edge, gradient) for edge, gradient in found_edges if edge is not None and gradient is not None]
    edges = [edge for edge, _ in pairs]
    values = [gradient for _, gradient in pairs]
    wanted = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
    roots, ends = [edge.node for edge in edges], [get_gradient_edge(each).node for each in wanted]
    children = children_of(roots, ends)
    if _is_indivisible(children):
        torch.autograd.backward(edges, values)
        return tuple(_take_gradient(each) for each in inputs), WeightPass([], [], [])
    weights = WeightPass(edges, values, groups_of(children, roots, ends))
    found = _gradients_of(wanted, edges, values, weights) if wanted and edges else ()
    by_input = dict(zip(map(id, wanted), found, strict=False))
    return tuple(by_input.get(id(each)) for each in inputs), weights


def divided_backward(
    stage: Any, what: str, values: dict[str, Any], last_backward: bool
) -> tuple[Gradients, WeightPass | None]:
    """In the place of torch's `stage.backward_maybe_with_nosync`: `what` is "input", and later "weight".

    Raises ValueError where DDP would have to take part in a backward pass that cannot be divided.
    """
    outputs, module = values["stage_output"], stage.submod
    if what == "weight":
        with _synchronized(module, outputs, last_backward):
            values["param_groups"].run()
        return (), None
    given, received = values["input_values"], len(stage._stage_meta.inputs)  # behind them: keyword arguments
    if isinstance(module, DistributedDataParallel):
        _check_divisible(stage.stage_index, outputs)
    with _synchronized(module, outputs, is_last=False):
        gradients, weights = backward_inputs(outputs, values["output_grads"], given[:received])
    if not isinstance(module, DistributedDataParallel):  # it looks for the parameters that they depend on
        _release(outputs)
    return gradients + (None,) * (len(given) - received), weights


def _edge_of(output: Root) -> GradientEdge | None:
    if isinstance(output, torch.Tensor):
        return get_gradient_edge(output) if output.requires_grad else None
    return output


def _check_divisible(stage_index: int, outputs: Sequence[Root]) -> None:
    roots = [edge.node for edge in map(_edge_of, outputs) if edge is not None]
    if _is_indivisible(children_of(roots, ())):
        raise UsageError(
            f"stage {stage_index} is wrapped by DistributedDataParallel and uses reentrant checkpointing, whose "
            "backward pass cannot be divided as zb-h1 does; use checkpoint(..., use_reentrant=False), schedule='1f1b', "
            "or holmes.DistributedOptimizer instead of the wrapper"
        )


def _is_indivisible(nodes: Iterable[Node]) -> bool:
    return any(node.name() == _INDIVISIBLE for node in nodes)


def _release(outputs: Sequence[Root]) -> None:
    """Parts outputs that somebody keeps from their graph, so that its memory is free once the parameters' pass ran."""
    for output in outputs:
        # A view cannot be parted in place.
        if isinstance(output, torch.Tensor) and output.grad_fn is not None and not output._is_view():
            output.detach_()


@contextmanager
def _synchronized(module: nn.Module, outputs: Any, is_last: bool) -> Iterator[None]:
    """Around a pass of a micro-batch: DDP and FSDP send gradients after the last one only."""
    if isinstance(module, DistributedDataParallel):
        if not is_last:
            with module.no_sync():
                yield
            return
        find_tensors: Any = nn.parallel.distributed._find_tensors
        module.reducer.prepare_for_backward(list(find_tensors(outputs)))  # as torch's stage does
    elif isinstance(module, FSDPModule):
        if not hasattr(module, "set_manual_backward_finalization"):  # which torch's stage has called then
            module.set_is_last_backward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(False)
    yield


def _gradients_of(
    wanted: Sequence[torch.Tensor], edges: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], left: WeightPass
) -> Gradients:
    handles = [node.register_prehook(_save(left.saved, node)) for group in left.groups for node in group.nodes]
    try:
        return torch.autograd.grad(edges, wanted, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()


def _save(saved: dict[Node, Gradients], node: Node) -> Callable[[Gradients], None]:
    def hook(gradients: Gradients) -> None:
        saved[node] = gradients

    return hook


def _take_gradient(value: Any) -> torch.Tensor | None:
    """What backward() left at a received input; the next micro-batch's is another."""
    if not isinstance(value, torch.Tensor) or not value.is_leaf:
        return None
    gradient, value.grad = value.grad, None
    return gradient
