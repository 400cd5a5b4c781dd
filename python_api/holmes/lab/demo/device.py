"""Device: what a rank of the demo trains on. Emulated nodes share this machine's GPUs as they share its cores."""

from __future__ import annotations

import os

import torch

from holmes_comm.errors import UsageError


def choose_device(asked: str = "") -> str:
    """`asked`, or where it is empty `cuda` if torch has a GPU, else `cpu`. Raises ValueError where it cannot be had."""
    if asked not in ("", "cpu", "cuda"):
        raise UsageError(f"--device {asked!r} is unknown; known are cpu and cuda")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and found != "cuda":
        raise UsageError("--device cuda needs a GPU and a torch with CUDA, and torch finds none; use --device cpu")
    return asked or found


def rank_device(name: str) -> torch.device:
    """This rank's device, made torch's current one: for "cuda" its GPU, taken in turns by rank. Local.

    Call it before the process group is made: NCCL takes ranks of one GPU only where it believes them on different
    hosts, which the environment tells it. Raises ValueError as choose_device does.
    """
    if choose_device(name) == "cpu":
        return torch.device("cpu")
    rank = int(os.environ.get("RANK", "0"))
    os.environ.setdefault("NCCL_HOSTID", f"holmes-demo-{rank}")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def finish(device: torch.device) -> None:
    """Waits for what a step put on the current stream: its time is that of the work, not of the launches. What other
    streams still carry, such as parameters on their way to the next step, goes on."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
