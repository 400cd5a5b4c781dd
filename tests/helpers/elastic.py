"""Elastic jobs of tests: what all of them say to run_elastic, in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import holmes


def train_elastic(train: Callable[[holmes.Generation], Any], store: str, folder: Any, **options: Any) -> Any:
    """``holmes.run_elastic`` with a plan of one layer; `options` over what the tests usually want."""
    usual = {"every_steps": 2, "heartbeat_s": 0.2, "dead_after_s": 10.0, "timeout_s": 30.0}
    return holmes.run_elastic(
        train,
        plan=lambda topology: holmes.make_plan(model_layers=1, pipeline=1, topology=topology),
        checkpoints=folder,
        store=store,
        **{**usual, **options},
    )
