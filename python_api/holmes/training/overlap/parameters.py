"""Parameters: which tensors of a model an optimizer trains, each once, with the name that checkpoints know it by."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holmes_comm.errors import UsageError

_log = logging.getLogger(__name__)

#: Addresses of buckets: what shares memory with a parameter there is an optimizer's own, perhaps a closed one's.
bucket_addresses: set[int] = set()


@dataclass(frozen=True)
class Trained:
    """One trained parameter; `group` is its index in `param_groups`."""

    name: str
    tensor: nn.Parameter
    group: int


def as_modules(model: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """The model, or the chunks of it that this rank holds (interleaved pipelines). Raises TypeError on others."""
    if not isinstance(model, nn.Module | Sequence):
        raise TypeError(f"model={model!r} is a {type(model).__name__}; give a torch.nn.Module or a sequence of them")
    modules = (model,) if isinstance(model, nn.Module) else tuple(model)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"model holds a {type(module).__name__}; give a torch.nn.Module or a sequence of them")
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"the model is a {type(module).__name__} of torch.jit, which runs no hooks: give the module that it "
                "was made from, and trace or script it when it is trained and the optimizer closed"
            )
        if any(isinstance(each, DistributedDataParallel) for each in module.modules()):
            raise ValueError(
                "the model is wrapped by DistributedDataParallel, which averages gradients too: give the module inside "
                "(ddp.module)"
            )
    return modules


def as_groups(modules: Sequence[nn.Module], params: Any) -> list[dict[str, Any]]:
    """`params` as torch optimizers take them (also with names, which are left out) -> parameter groups; None: all of
    the model. Raises UsageError where nothing of it is trained."""
    if params is None:
        unique = {id(p): p for module in modules for p in module.parameters()}
        params = list(unique.values())
    entries = [entry[1] if isinstance(entry, tuple) else entry for entry in params]  # named_parameters()
    groups = (
        [dict(entry) for entry in entries] if entries and isinstance(entries[0], Mapping) else [{"params": entries}]
    )
    for group in groups:
        given = group["params"]
        tensors = [given] if isinstance(given, torch.Tensor) else [p[1] if isinstance(p, tuple) else p for p in given]
        if strange := [p for p in tensors if not isinstance(p, torch.Tensor)]:
            raise UsageError(f'params holds {strange[0]!r}; give parameters, or dicts of settings with "params"')
        group["params"] = tensors
    if not any(p.requires_grad for group in groups for p in group["params"]):
        if not entries:
            raise UsageError("there is no parameter to train; give params= some, or a model that has one")
        raise UsageError("no parameter of the model is trained: every one has requires_grad=False")
    return groups


def without_frozen(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups with what is trained of their parameters."""
    return [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]


def trained_parameters(
    modules: Sequence[nn.Module], groups: Sequence[Mapping[str, Any]], name_of: Callable[[str], str] | None
) -> list[Trained]:
    """The parameters of `groups`, in the order in which the model registers them. Tied ones count once.

    `name_of` turns a name of this rank's model into the one that checkpoints use. Raises ValueError where a parameter
    of a group is not the model's, is given twice or cannot be trained here, or where two have one name.
    """
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    given = Counter(id(p) for group in groups for p in group["params"])
    trained: list[Trained] = []
    names: set[str] = set()
    for number, module in enumerate(modules):
        prefix = f"{number}." if len(modules) > 1 else ""
        for local, tensor in module.named_parameters(remove_duplicate=True):
            group = group_of.pop(id(tensor), None)
            if group is None:
                continue
            name = (name_of or str)(prefix + local)
            if name in names:
                raise ValueError(f"two parameters are named {name!r}; name_of must give each its own name")
            if given[id(tensor)] > 1:
                raise UsageError(
                    f"parameter {name!r} stands {given[id(tensor)]} times in params, and torch's own optimizers would "
                    "step it as often: give it once"
                )
            _check(name, tensor)
            names.add(name)
            trained.append(Trained(name, tensor, group))
    if group_of:
        raise ValueError(
            f"{len(group_of)} tensor(s) in params are not parameters of the model; give the model that has them"
        )
    return trained


def _check(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, nn.UninitializedParameter):
        raise ValueError(f"parameter {name!r} has no shape yet (a lazy module); run a batch through the model first")
    if tensor.is_meta:
        raise ValueError(
            f"parameter {name!r} is on the meta device and has no values: give the model memory (model.to_empty) and "
            "values first"
        )
    if not tensor.dtype.is_floating_point:
        raise ValueError(f"parameter {name!r} is {tensor.dtype}; only real floating-point parameters are supported")
    if type(tensor.data) is not torch.Tensor:
        raise ValueError(
            f"parameter {name!r} is a {type(tensor.data).__name__}; give modules whose parameters are plain tensors "
            "(of a tensor-parallel layer: this rank's part)"
        )


def parameter_places(
    modules: Sequence[nn.Module], index_of: Mapping[int, int]
) -> list[tuple[nn.Module, str, nn.Parameter, str]]:
    """(module, attribute, parameter, full name) of each place in which a trained parameter stands.

    `index_of`: id of a trained parameter -> its index.
    """
    return [
        (module, attribute, parameter, f"{prefix}.{attribute}" if prefix else attribute)
        for root in modules
        for prefix, module in root.named_modules()
        for attribute, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in index_of
    ]


def check_embeddings(modules: Sequence[nn.Module], trained: Sequence[Trained]) -> None:
    """Raises ValueError where a trained embedding has max_norm: its forward changes the rows of this rank's batch."""
    names = {id(entry.tensor): entry.name for entry in trained}
    for module in (each for root in modules for each in root.modules()):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            name = names.get(id(module.weight))
            if name is not None:
                raise ValueError(
                    f"parameter {name!r} is of an embedding with max_norm={module.max_norm:g}, which changes the rows "
                    "that a rank's own batch uses, so ranks would train different models; leave max_norm off and "
                    "renormalise all rows after step, under no_grad: "
                    f"weight.copy_(weight.renorm({module.norm_type:g}, 0, {module.max_norm:g}))"
                )


def warn_of_left_out(modules: Sequence[nn.Module], is_optimized: Callable[[nn.Parameter], bool]) -> None:
    """Warns where parameters get gradients that nobody averages. `is_optimized`: whether a parameter has such an
    optimizer."""
    left_out = [
        name
        for module in modules
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and parameter.grad is not None and not is_optimized(parameter)
    ]
    if left_out:
        _log.warning(
            "%d parameter(s) of the model, %r first, get gradients but are in no DistributedOptimizer: another "
            "optimizer would step each rank's with its own gradients. Give them to one, or set requires_grad=False",
            len(left_out),
            left_out[0],
        )


def warn_of_shared_memory(trained: Sequence[Trained]) -> None:
    """Raises ValueError where two parameters overlap in memory, and warns where something else shares one's: parameters
    are about to move into buckets, which their views do not follow."""
    spans: dict[int, list[tuple[int, int, Trained]]] = {}
    shared: list[str] = []
    for entry in trained:
        tensor = entry.tensor
        if tensor.numel():
            start = int(tensor.storage_offset())
            last = sum((int(n) - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.setdefault(tensor.untyped_storage()._cdata, []).append((start, start + last + 1, entry))
    for members in spans.values():
        members.sort(key=lambda span: span[:2])
        for (_, end, one), (start, _, other) in itertools.pairwise(members):
            if start < end:
                raise ValueError(
                    f"parameters {one.name!r} and {other.name!r} share memory, but their buckets will not; tie them by "
                    "using one nn.Parameter in both places"
                )
        storage = members[0][2].tensor.untyped_storage()
        if storage.data_ptr() not in bucket_addresses and _holders(storage) > 1 + len(
            members
        ):  # `storage` itself, and the parameters
            shared.append(members[0][2].name)
    cpu = [entry for entry in trained if entry.tensor.device.type == "cpu"]
    seen_by_others = [entry.name for entry in cpu if entry.tensor.is_shared()]  # type: ignore[no-untyped-call]
    if seen_by_others:
        _log.warning(
            "%d parameter(s), %r first, are in memory shared with other processes (share_memory()). The first step "
            "moves parameters into buckets of this process: others no longer see them change",
            len(seen_by_others),
            seen_by_others[0],
        )
    if shared:
        _log.warning(
            "the memory of %d parameter(s), %r first, is also some other tensor's (a .detach(), .data or state_dict "
            "kept from before the first step?). The first step moves parameters into buckets; it stays behind",
            len(shared),
            shared[0],
        )


def _holders(storage: torch.UntypedStorage) -> int:
    """How many tensors and storages hold this memory; 0 where torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return int(count(storage._cdata)) if count is not None else 0
