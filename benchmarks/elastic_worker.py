"""A rank of examples/elastic_gpt.py, with times, and held at a step until told to go on. Started by elastic_job.py."""

import argparse
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import elastic_gpt
import torch

import holmes
from holmes.demo.settings import Settings
from holmes.recovery import Rules

HOLD_S = 60.0  # at most


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("options", type=json.loads)
    options = parser.parse_args().options
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("holmes.overlap").setLevel(logging.WARNING)
    settings = Settings(**options["settings"])

    def train(run: holmes.Generation) -> None:
        def after_step(step: int) -> None:
            hold = options["hold"].get(str(run.number))
            deadline_s = time.monotonic() + HOLD_S
            while hold and step == hold["step"] and not Path(hold["file"]).exists() and time.monotonic() < deadline_s:
                time.sleep(0.02)
            time.sleep(options["pause_s"])

        elastic_gpt.train(run, settings, options["until"], after_step)

    plans = 0

    def plan(topology: holmes.Topology) -> holmes.Plan:
        nonlocal plans
        plans += 1
        fault = options["fault"].get(os.environ["HOLMES_HOSTNAME"])
        if fault and plans == fault["plan"]:  # between the default group and the others
            print("fault", flush=True)
            os.kill(os.getpid(), getattr(signal, fault["signal"]))
        return elastic_gpt.make_plan(topology, settings)

    holmes.run_elastic(
        train,
        plan=plan,
        checkpoints=options["checkpoints"],
        every_steps=options["every"],
        rules=Rules(options["ranks"], min_ranks=options["min_ranks"], join_timeout_s=60, agree_timeout_s=20),
        heartbeat_s=options["heartbeat_s"],
        dead_after_s=options["dead_after_s"],
        timeout_s=60,
    )
    print("done", flush=True)


if __name__ == "__main__":
    main()
