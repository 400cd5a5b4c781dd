"""PyTorch's own DistributedTest, over Holmes wherever it names Gloo (HOLMES_REPLACES=gloo); by `make test-distributed`.

The suite is torch's, as installed: each test starts WORLD_SIZE processes. What fails and is expected to is listed here
with its reason; a test of the list that passes is reported as a failure, so that the list stays true.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import pytest

if os.environ.get("BACKEND") != "gloo" or os.environ.get("HOLMES_REPLACES") != "gloo":
    pytest.skip("torch's DistributedTest: make test-distributed", allow_module_level=True)
pytest.importorskip("expecttest", reason="torch's tests need expecttest: make test-distributed installs it")

from torch.testing._internal import common_distributed
from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

LIMIT_S = 60
common_distributed.TIMEOUT_DEFAULT = LIMIT_S
common_distributed.TIMEOUT_OVERRIDE.clear()

_MISSING = "every rank is told which rank monitored_barrier misses, where Gloo has a text for each case"
#: What fails over Holmes, and why.
EXPECTED = {
    "test_get_backend": "the backend that is there is called holmes",
    "test_ddp_logging_data_cpu": "DDP's log calls every backend but torch's own custom",
    "test_monitored_barrier_failure_order": _MISSING,
    "test_monitored_barrier_gloo": _MISSING,
    "test_monitored_barrier_gloo_rank_0_timeout": _MISSING,
}


def _in_environment(environment: dict[str, str], target: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """In a process that was forked from a server, which has the environment of its start."""
    os.environ.clear()
    os.environ.update(environment)
    distributed_test.INIT_METHOD = environment["INIT_METHOD"]  # read when it was imported
    target(*args, **kwargs)


def _process(target: Callable[..., None], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forked from a server that has imported torch: a test takes a second less for each of its processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([distributed_test.__name__])
    return context.Process(target=_in_environment, name=name, args=(dict(os.environ), target, *args), kwargs=kwargs)


class TestDistributedOverHolmes(TestDistBackend, DistributedTest._DistTestBase):
    """Each method of torch's suite."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(_process)


for _name, _why in EXPECTED.items():
    _test = getattr(TestDistributedOverHolmes, _name)
    setattr(TestDistributedOverHolmes, _name, pytest.mark.xfail(reason=_why, strict=True)(_test))
