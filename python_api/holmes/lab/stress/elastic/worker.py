"""A rank of an elastic job: `python -m holmes.lab.stress.elastic.worker FOLDER STORE [SETTINGS]`.

RANK and WORLD_SIZE as ever; SETTINGS: those of JobSettings, as JSON.

Trains numbers that depend on the steps alone, whoever takes part, and tells each step, for the driver, on stdout.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import holmes
from holmes.lab.stress.elastic.expected import DECAY, gradient
from holmes.lab.stress.elastic.settings import EVERY_STEPS, STEP_S, JobSettings
from holmes.lab.stress.faults.messages import STACKS_SIGNAL
from holmes.training.recovery import Rules
from holmes_comm.errors import HolmesError


def tell(event: str, **fields: object) -> None:
    """One line."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def train(run: holmes.Generation, settings: JobSettings) -> float:
    """Every step adds what all ranks agree on, so that a lost, repeated or mixed step shows in the end."""
    # Enough of them that each rank writes a part of a checkpoint.
    model = nn.ParameterList([torch.zeros(1, dtype=torch.float64) for _ in range(4 * settings.ranks)])
    run.restore(model=model)
    _ = run.groups  # on their NICs, as in a training
    for step in run.steps(settings.steps):
        began_s = time.monotonic()
        total = torch.tensor([gradient(step)], dtype=torch.float64)
        dist.all_reduce(total)  # all ranks, whatever the plan makes of them
        with torch.no_grad():
            for weight in model:
                weight.mul_(DECAY).add_(total.item() / run.world_size)
        tell(
            "step",
            generation=run.number,
            step=step,
            ranks=run.world_size,
            began_s=began_s,
            value=model[0].item(),
        )
        time.sleep(STEP_S)
    values = {weight.item() for weight in model}
    return values.pop() if len(values) == 1 else math.nan


def main() -> int:
    """Exit status 0 where the job is done, 3 where an error of the library ended this rank."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True)  # where is one that hangs
    torch.set_num_threads(1)
    settings = JobSettings.from_json(sys.argv[3]) if len(sys.argv) > 3 else JobSettings()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    try:
        value = holmes.run_elastic(
            lambda run: train(run, settings),
            plan=lambda topology: holmes.workable_plan(topology, model_layers=4, pipeline=1),
            checkpoints=sys.argv[1],
            every_steps=EVERY_STEPS,
            store=sys.argv[2],
            rules=Rules(settings.ranks, **settings.rules),
            **settings.times,
        )
    except HolmesError as error:
        tell("error", error=type(error).__name__, message=str(error))
        return 3
    tell("done", value=value)
    return 0


if __name__ == "__main__":
    sys.exit(main())
