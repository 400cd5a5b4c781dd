"""Element-wise: whether an optimizer's update of an element depends on nothing but that element. It is tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_SHAPE, _CUT = (6, 5), 13  # a parameter, and where it is cut into two shards
#: Of the steps' gradients: some rules begin with large ones, with small ones, with none, or after some steps.
_SCALES = (1.0, 1.0, 1e3, 1e-4, 0.0, 30.0, 1.0, 1.0)
#: Of GPUs only, where the trial runs on the host; they change how a step is made, not what it gives.
_HOW = ("capturable", "fused", "foreach")


def settings_kind(group: Mapping[str, Any]) -> str:
    """Equal for param_groups whose settings differ in nothing but the size of numbers: which rules they turn on."""

    def kind(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, torch.Tensor | int | float):
            return [kind(each) for each in value] if isinstance(value, tuple | list) else repr(value)
        return (float(value) > 0) - (float(value) < 0)

    left_out = ("params", "lr", "initial_lr", "max_lr", "min_lr")  # of schedulers, and a factor of every rule
    return repr({key: kind(value) for key, value in sorted(group.items()) if key not in left_out})


def check_elementwise(
    optimizer_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any], group: Mapping[str, Any]
) -> bool:
    """Local, milliseconds. Steps two small parameters together, and in shards that an optimizer of its own each steps,
    on the host, with the settings of `group` (of param_groups) beside `arguments`.

    Returns whether a step can be undone by restoring each parameter's state: not where the state is not flat (tensors
    and numbers), or where the optimizer has counters of its own. Raises ValueError where shards give different numbers,
    where the class cannot step a shard at all, or where it keeps state in its param_groups, which shards do not share,
    or in its state for no parameter, which checkpoints do not hold.
    """
    name = optimizer_class.__name__
    known = {key: value for key, value in arguments.items() if key not in _HOW}
    settings = {key: value for key, value in group.items() if key not in ("params", *_HOW)}
    generator = torch.Generator().manual_seed(7)
    starts = [torch.randn(_SHAPE, generator=generator) for _ in range(2)]
    gradients = [[torch.randn(_SHAPE, generator=generator) for _ in starts] for _ in _SCALES]
    gradients = [[part * scale for part in step] for step, scale in zip(gradients, _SCALES, strict=True)]
    gradients[-1][0][0, 0] = float("nan")  # some rules leave a parameter alone for that
    whole = _Trial(optimizer_class, known, settings, [start.clone() for start in starts])
    shards: list[_Trial] = []
    try:
        whole.train(gradients)
        for index, start in enumerate(starts):
            for part in (slice(0, _CUT), slice(_CUT, None)):
                shards.append(_Trial(optimizer_class, known, settings, [start.flatten()[part].clone()]))
                shards[-1].train([[step[index].flatten()[part]] for step in gradients])
    except Exception as error:
        raise ValueError(
            f"{name} needs whole parameters (or sparse gradients, or a closure), but each rank steps a flat shard of "
            f"them; tried on one, it says: {error}. Use an element-wise one such as AdamW, Adam or SGD"
        ) from error
    sharded = torch.cat([shard.values for shard in shards], dim=1)
    if not torch.allclose(sharded, whole.values, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise ValueError(
            f"{name} needs whole parameters: tried on two parameters and on shards of them, it gives different "
            "numbers, but each rank steps shards; use an element-wise one such as AdamW, Adam or SGD, and "
            "max_grad_norm= to clip"
        )
    if whole.changed_settings:
        raise ValueError(
            f"{name} keeps state in its param_groups ({', '.join(whole.changed_settings)} changed in a step), which "
            "ranks that step shards do not share; use one whose state is in optimizer.state, such as AdamW, Adam or SGD"
        )
    if whole.other_state:
        raise ValueError(
            f"{name} keeps state for no parameter (optimizer.state[{whole.other_state[0]!r}]), which checkpoints of "
            "shards do not hold; keep it in each parameter's state, as AdamW does its step"
        )
    return shards[0].has_flat_state and not shards[0].changed_attributes


class _Trial:
    """An optimizer on tensors of its own."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        arguments: Mapping[str, Any],
        settings: Mapping[str, Any],
        tensors: list[torch.Tensor],
    ) -> None:
        def copied(values: Mapping[str, Any]) -> dict[str, Any]:
            return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}

        self.tensors = tensors
        self._seen: list[torch.Tensor] = []
        self.changed_settings: list[str] = []
        self.changed_attributes: list[str] = []
        self._optimizer = optimizer_class([{"params": tensors, **copied(settings)}], **copied(arguments))

    def train(self, gradients: Sequence[Sequence[torch.Tensor]]) -> None:
        """Steps with each of `gradients`."""
        settings, attributes = self._settings(), self._attributes()
        for step in gradients:
            for tensor, gradient in zip(self.tensors, step, strict=True):
                tensor.grad = gradient.clone()
            self._optimizer.step()
            self._seen.append(torch.cat([tensor.flatten() for tensor in self.tensors]))
        self.changed_settings = _changed(settings, self._settings())
        self.changed_attributes = _changed(attributes, self._attributes())

    @property
    def values(self) -> torch.Tensor:
        """Those of all tensors, a row after each step."""
        return torch.stack(self._seen)

    @property
    def other_state(self) -> list[Any]:
        """Keys of the state that are no parameters."""
        return [key for key in self._optimizer.state if not isinstance(key, torch.Tensor)]

    @property
    def has_flat_state(self) -> bool:
        """Whether each parameter's state has tensors and numbers only."""
        values = [value for state in self._optimizer.state.values() for value in state.values()]
        return all(value is None or isinstance(value, torch.Tensor | int | float) for value in values)

    def _settings(self) -> dict[str, str]:
        (group,) = self._optimizer.param_groups
        return {key: str(value) for key, value in group.items() if key != "params"}

    def _attributes(self) -> dict[str, str]:
        known = ("state", "param_groups", "defaults")
        return {key: repr(value) for key, value in vars(self._optimizer).items() if key not in known}


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return [key for key, value in after.items() if value != before.get(key)]
