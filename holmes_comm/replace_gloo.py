"""HOLMES_REPLACES=gloo: trainers that name Gloo themselves get Holmes, without an edit.

Hugging Face Accelerate, for one, always takes Gloo for tensors in host memory. The name is replaced where torch is told
it, in `init_process_group` and `new_group`; groups of other backends stay as they are.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from holmes_comm.errors import UsageError

_VARIABLE = "HOLMES_REPLACES"


def install() -> None:
    """Replaces Gloo in this process if the environment says so. Local. With another value the calls that make groups
    raise UsageError: nobody trains on what was not asked for."""
    if not os.environ.get(_VARIABLE, ""):
        return
    import torch.distributed as dist

    for name in ("init_process_group", "new_group"):
        original = getattr(dist.distributed_c10d, name)
        wrapper = functools.wraps(original)(functools.partial(_call, original))
        for module in (dist, dist.distributed_c10d, dist.device_mesh):
            if getattr(module, name, None) is original:
                setattr(module, name, wrapper)


def _call(original: Any, *args: Any, **kwargs: Any) -> Any:
    if (wanted := os.environ.get(_VARIABLE, "")) not in ("", "gloo"):
        raise UsageError(f"{_VARIABLE}={wanted!r} is not possible; it must be 'gloo', or unset")
    position = 0 if original.__name__ == "init_process_group" else 2  # of the argument `backend`
    if len(args) > position:
        args = (*args[:position], replaced(args[position]), *args[position + 1 :])
    elif "backend" in kwargs:
        kwargs["backend"] = replaced(kwargs["backend"])
    return original(*args, **kwargs)


def replaced(backend: str | None) -> str | None:
    """ "gloo" becomes "holmes", also in "cpu:gloo,cuda:nccl"; None, torch's own choice, stays."""
    if backend is None:
        return None
    parts = [part.rpartition(":") for part in str(backend).split(",")]
    return ",".join(device + colon + ("holmes" if name.lower() == "gloo" else name) for device, colon, name in parts)
