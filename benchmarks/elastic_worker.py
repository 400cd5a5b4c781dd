"""A rank of examples/elastic_gpt.py that can be held at a step and can hurt itself. Started by elastic_node.py."""

import contextlib
import logging
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import elastic_gpt
import torch
import torch.distributed.checkpoint

import holmes
from holmes.lab.demo.settings import Settings
from holmes.training.recovery import Rules

HOLD_S = 120.0  # at most


def open_kinds() -> tuple[int, str]:
    """How much this process has open, and what: files by their paths, the rest by what they are."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder's own
            names.append(os.readlink(descriptor).partition(":[")[0])
    return len(names), ", ".join(f"{count} {name}" for name, count in sorted(Counter(names).items()))


def run(options: dict) -> None:
    """`options`: those of elastic_job.ElasticJob."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("holmes.training.overlap").setLevel(logging.WARNING)
    settings = Settings(**options["settings"])
    plans = 0

    def plan(topology: holmes.Topology) -> holmes.Plan:
        nonlocal plans
        plans += 1
        fault = options["fault"].get(os.environ["HOLMES_HOSTNAME"])
        # Between making the default group and the others; not again in a replacement.
        if fault and plans == fault["plan"] and not Path(fault["once"]).exists():
            Path(fault["once"]).touch()
            print("fault", flush=True)
            os.kill(os.getpid(), getattr(signal, fault["signal"]))
        return elastic_gpt.make_plan(topology, settings)

    def train(generation: holmes.Generation) -> None:
        def after_step(step: int) -> None:
            count, kinds = open_kinds()
            where = f"process {os.getpid()} in generation {generation.number}"
            print(f"{count} descriptors of {where}: {kinds}", flush=True)
            hold = options["hold"].get(str(generation.number))
            deadline_s = time.monotonic() + HOLD_S
            while hold and step == hold["step"] and not Path(hold["file"]).exists() and time.monotonic() < deadline_s:
                time.sleep(0.02)

        elastic_gpt.train(generation, settings, options["until"], after_step)

    holmes.run_elastic(
        train,
        plan=plan,
        checkpoints=options["checkpoints"],
        every_steps=options["every"],
        rules=Rules(
            options["ranks"],
            options["min_ranks"],
            join_timeout_s=300,
            agree_timeout_s=20,
            lease_s=options["lease_s"],
        ),
        heartbeat_s=options["heartbeat_s"],
        dead_after_s=options["dead_after_s"],
        timeout_s=20,
    )
