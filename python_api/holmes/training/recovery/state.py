"""State: what a checkpoint holds of the caller's objects, under names that any layout understands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holmes.planning.plan.plan import Plan
from holmes_comm.errors import UsageError


class TrackedState:
    """Objects with `state_dict` and `load_state_dict`, by name. Not thread-safe.

    Parameters and buffers of modules are saved as `name_of(their name in the module)`: stages of a pipeline that use
    equal names for different layers need it.
    """

    def __init__(self, objects: Mapping[str, Any], name_of: Callable[[str], str] | None) -> None:
        for name, tracked in objects.items():
            if not (hasattr(tracked, "state_dict") and hasattr(tracked, "load_state_dict")):
                raise TypeError(
                    f"{name} is a {type(tracked).__name__}, without state_dict and load_state_dict; give modules, "
                    "optimizers, schedulers or objects of that kind"
                )
        self._objects = dict(objects)
        self._name_of = name_of or (lambda name: name)

    def collect(self) -> dict[str, Any]:
        """Local. Sharing memory with the objects; waits for parameters that are under way."""
        for tracked in self._objects.values():
            if callable(synchronize := getattr(tracked, "synchronize", None)):
                synchronize()
        return {name: self._renamed(tracked) for name, tracked in self._objects.items()}

    def give_back(self, state: Mapping[str, Any]) -> None:
        """Local. What `collect` gave, filled from a checkpoint."""
        for name, tracked in self._objects.items():
            loaded = state[name]
            if isinstance(tracked, nn.Module):
                loaded = {own: loaded[self._name_of(own)] for own in tracked.state_dict()}
            tracked.load_state_dict(loaded)

    def check_names(self, plan: Plan) -> None:
        """Collective over the default group. Raises ValueError where ranks hold different parameters under one name.

        Only one of them would be saved. Ranks of one data-parallel group hold the same; their first one counts.
        """
        if plan.data == plan.world_size:
            return
        rank = dist.get_rank()
        mine = self._sums() if plan.group_of("dp", rank).ranks[0] == rank else {}
        rows: list[Any] = [None] * plan.world_size
        dist.all_gather_object(rows, mine)
        first: dict[str, tuple[int, Any]] = {}
        for other, sums in enumerate(rows):
            for name, value in sums.items():
                known_rank, known = first.setdefault(name, (other, value))
                if known != value:
                    raise UsageError(
                        f"ranks {known_rank} and {other} hold different parameters named {name!r}: a checkpoint would "
                        "keep only one of them; give restore(name_of=...) that makes names of one stage differ from "
                        "another's, for example by the number of the layer in the whole model"
                    )

    def _renamed(self, tracked: Any) -> Any:
        state = tracked.state_dict()
        return (
            {self._name_of(name): value for name, value in state.items()} if isinstance(tracked, nn.Module) else state
        )

    def _sums(self) -> dict[str, tuple[list[int], str]]:
        found = {}
        for key, tracked in self._objects.items():
            for name, parameter in tracked.named_parameters() if isinstance(tracked, nn.Module) else ():
                if type(parameter.data) is torch.Tensor:  # a DTensor says itself what part it is
                    total = parameter.detach().double().sum().item()
                    found[f"{key}.{self._name_of(name)}"] = (list(parameter.shape), repr(total))
        return found
