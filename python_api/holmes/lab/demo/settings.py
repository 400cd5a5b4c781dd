"""Settings: everything the three runs share."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from holmes_comm.errors import UsageError

MARK = "HOLMES-DEMO "  # begins a rank's line that is meant for the demo


def choose_device(asked: str = "") -> str:
    """`asked`, or where it is empty `cuda` if torch has a GPU, else `cpu`. Raises ValueError where it cannot be had."""
    if asked not in ("", "cpu", "cuda"):
        raise UsageError(f"--device {asked!r} is unknown; known are cpu and cuda")
    if asked == "cpu":
        return asked
    import torch  # seconds: not to refuse a name, nor for the processor

    found = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and found != "cuda":
        raise UsageError("--device cuda needs a GPU and a torch with CUDA, and torch finds none; use --device cpu")
    return found


@dataclass(frozen=True)
class Settings:
    """Model, data and optimizer, equal in all runs. Batch sizes in samples, `sequence` in characters.

    `device`: "cpu" or "cuda" (see `device.py`). `plan`: path of a saved plan that the Holmes run follows; "" lets it
    discover and plan by itself. `overlap`: whether its gradients and parameters travel beside compute. `slowdown`: node
    name -> how many times as long its compute takes (see `slow_compute`).
    """

    layers: int = 8
    width: int = 256
    heads: int = 4
    sequence: int = 32
    global_batch: int = 8
    micro_batches: int = 2
    pipeline: int = 2
    steps: int = 20
    learning_rate: float = 1e-3
    bucket_mib: float = 4.0
    seed: int = 1234
    device: str = "cpu"
    plan: str = ""
    overlap: bool = True
    slowdown: Mapping[str, float] = field(default_factory=dict)

    @property
    def timeline_step(self) -> int:
        """The step that the picture shows: a late one, past all warm-up."""
        return max(0, self.steps - 2)

    def to_json(self) -> str:
        """One line of JSON, as the rank scripts take it."""
        return json.dumps(dataclasses.asdict(self))

    def share(self, parts: int, what: str) -> int:
        """Samples of one of `parts` equal shares of the global batch. Raises ValueError where it does not divide."""
        if self.global_batch % parts:
            raise UsageError(
                f"global_batch={self.global_batch} does not divide by {parts} ({what}); "
                f"use {self.global_batch // parts * parts or parts} or {(self.global_batch // parts + 1) * parts}"
            )
        return self.global_batch // parts


def rank_arguments() -> tuple[Settings, str]:
    """The settings and the backend of a rank script's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=lambda text: Settings(**json.loads(text)), default=Settings())
    parser.add_argument("--backend", default="holmes")
    arguments = parser.parse_args()
    return arguments.settings, arguments.backend
