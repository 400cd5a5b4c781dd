"""PyTorch's own DistributedTest: how its tests start their processes, for the runs of it over Holmes."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any

SUITE = "torch.testing._internal.distributed.distributed_test"
LIMIT_S = 60


def limit_tests() -> None:
    """No test takes longer, whatever torch grants it."""
    from torch.testing._internal import common_distributed

    common_distributed.TIMEOUT_DEFAULT = LIMIT_S
    common_distributed.TIMEOUT_OVERRIDE.clear()


def forked_from(preloaded: Sequence[str], prepare: Callable[[int], None] | None = None) -> Callable[..., Any]:
    """What MultiProcessTestCase makes its processes with: forked from a server that has imported these modules.

    A test takes seconds less for each of its processes. `prepare`: called there with the rank, before the test.
    """
    return functools.partial(_process, tuple(preloaded), prepare)


def _process(
    preloaded: Sequence[str],
    prepare: Callable[[int], None] | None,
    target: Callable[..., None],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    given = (dict(os.environ), prepare, target, *args)
    return context.Process(target=_in_environment, name=name, args=given, kwargs=kwargs)


def _in_environment(
    environment: dict[str, str],
    prepare: Callable[[int], None] | None,
    target: Callable[..., None],
    *args: Any,
    **kwargs: Any,
) -> None:
    """The server has the environment of its start."""
    os.environ.clear()
    os.environ.update(environment)
    importlib.import_module(SUITE).INIT_METHOD = environment["INIT_METHOD"]  # type: ignore[attr-defined]  # read once
    if prepare is not None:
        prepare(args[0])
    target(*args, **kwargs)
