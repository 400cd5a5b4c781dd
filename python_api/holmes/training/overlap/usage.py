"""Usage: what one step shows of a model: the order of its gradients, and which module uses which parameter first."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


class UsageRecord:
    """What the first step showed, by parameter index. Not thread-safe."""

    def __init__(self) -> None:
        self.gradient_counts: dict[int, int] = {}  # gradients between two optimizer steps
        self.module_order: dict[nn.Module, int] = {}
        self.passes: set[int] = set()  # autograd's, since the last step
        self._passes_of: dict[int, set[int]] = {}
        self._last: dict[int, int] = {}
        self._events = 0

    def saw_gradient(self, index: int) -> None:
        """Parameter `index` accumulated a gradient."""
        self._events += 1
        task = torch._C._current_graph_task_id()
        self.passes.add(task)
        self._passes_of.setdefault(index, set()).add(task)
        self._last[index] = self._events
        self.gradient_counts[index] = self.gradient_counts.get(index, 0) + 1

    def saw_module(self, module: nn.Module) -> None:
        """A module's forward begins."""
        self.module_order.setdefault(module, len(self.module_order))

    def forget_gradients(self) -> None:
        """They were dropped: the step begins anew."""
        self.gradient_counts.clear()
        self.passes.clear()
        self._passes_of.clear()
        self._last.clear()

    def usual_count(self) -> int:
        """How many gradients parameters get in a step: as many as there were passes, if one had a gradient in each of
        them, and else (a pass for each of two models' losses, say) as many as most had."""
        if self.passes and self.passes in self._passes_of.values():
            return len(self.passes)
        return statistics.mode(self.gradient_counts.values() or [1])

    def usual_counts(self, count: int, usual: int) -> list[int]:
        """For each of `count` parameters its gradients of the step; 0 where they were fewer than `usual`.

        Such a parameter may have more in another step (an expert that few micro-batches use): nobody may count on it.
        """
        counts = [self.gradient_counts.get(index, 0) for index in range(count)]
        return [each if each >= usual else 0 for each in counts]

    def gradient_places(self, count: int, usual: int) -> list[int]:
        """For each of `count` parameters the place of its last gradient in time, from 1; 0 where none can be counted on
        (see `usual_counts`)."""
        counts = self.usual_counts(count, usual)
        return [self._last[index] if counts[index] else 0 for index in range(count)]


@dataclass(frozen=True)
class Needs:
    """Which parameters (by index) must be there before which module's forward.

    `homeless` ones have no module whose forward was seen: they must be there as soon as the step ends.
    """

    of_module: Mapping[nn.Module, frozenset[int]]
    homeless: frozenset[int]


def find_needs(modules: Sequence[nn.Module], index_of: Mapping[int, int], record: UsageRecord) -> Needs:
    """Each parameter is needed by the modules that own it, and where such a module's forward was not seen (a parent
    uses its child's weight directly, as nn.MultiheadAttention does) by its nearest ancestor whose forward was.

    `index_of`: id of a parameter -> its index.
    """
    needs: dict[nn.Module, set[int]] = {}
    housed: set[int] = set()

    def visit(module: nn.Module, ancestor: nn.Module | None) -> None:
        called = module if module in record.module_order else ancestor
        own = {index_of[id(p)] for p in module._parameters.values() if p is not None and id(p) in index_of}
        if own:
            needs.setdefault(module, set()).update(own)
            if called is not None:
                needs.setdefault(called, set()).update(own)
                housed.update(own)
        for child in module.children():
            visit(child, called)

    for module in modules:
        visit(module, None)
    return Needs({m: frozenset(own) for m, own in needs.items()}, frozenset(index_of.values()) - housed)


def first_uses(needs: Needs, record: UsageRecord, count: int) -> list[int]:
    """For each of `count` parameters when forward first needs it, from 1; 0: at once."""
    first = [0] * count
    for module, place in sorted(record.module_order.items(), key=lambda item: -item[1]):
        for index in needs.of_module.get(module, ()):
            first[index] = place + 1
    return first


def agree(group: dist.ProcessGroup | None, rows: Sequence[Sequence[int]], device: torch.device) -> list[list[int]]:
    """Collective over `group`. The greatest of each number over the ranks; `rows` have equal lengths everywhere."""
    tensor = torch.tensor(rows, dtype=torch.int64, device=device)
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    agreed: list[list[int]] = tensor.tolist()
    return agreed
