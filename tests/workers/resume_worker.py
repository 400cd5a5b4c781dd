"""A rank of test_optimizer_resume: trains on from the last checkpoint of a folder; one rank is killed in mid-step.

resume_worker.py FOLDER STEPS VICTIM KILLED_STEP    # VICTIM -1: nobody
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import holmes
from holmes.lab.demo.model import Batches, Stage, loss_of
from holmes.lab.demo.settings import Settings
from holmes_comm.errors import PeerLostError

SETTINGS = Settings(layers=2, width=32, heads=2, sequence=16, global_batch=16)
CHECKPOINT_EVERY = 4
TIMEOUT_S = 20.0


def say(**fields):
    print("SAYS " + json.dumps({"rank": dist.get_rank(), **fields}), flush=True)


def die_in_backward(optimizer, model):
    """When the first layer's gradient comes, reduce-scatters of this step are already under way."""

    def hook(_parameter):
        say(killed_s=time.monotonic(), sent=len(optimizer._runtime.reducer.transfers))
        os.kill(os.getpid(), signal.SIGKILL)

    next(model.blocks.parameters()).register_post_accumulate_grad_hook(hook)


def train(folder, steps, victim, killed_step):
    batches = Batches(SETTINGS)
    model = Stage(SETTINGS, batches.vocabulary, range(SETTINGS.layers))
    optimizer = holmes.DistributedOptimizer(model, torch.optim.AdamW, lr=SETTINGS.learning_rate, bucket_bytes=8192)
    first = int((folder / "last").read_text()) if (folder / "last").exists() else 0
    if first:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder / str(first))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(first, steps):
        if dist.get_rank() == victim and step == killed_step:
            die_in_backward(optimizer, model)
        inputs, targets = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batches.batch(step))
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        say(step=step, loss=mean.item() / dist.get_world_size())
        if (step + 1) % CHECKPOINT_EVERY == 0:
            optimizer.synchronize()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.save(state, checkpoint_id=folder / str(step + 1))
            if dist.get_rank() == 0:  # named only now that it is whole
                (folder / "last.new").write_text(str(step + 1))
                (folder / "last.new").replace(folder / "last")


def main():
    folder, steps, victim, killed_step = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    dist.init_process_group("holmes", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        train(folder, steps, victim, killed_step)
    except PeerLostError as error:
        say(peer=error.peer, host=error.host, nic=error.nic, message=str(error), failed_s=time.monotonic())
        dist.destroy_process_group()
        return 1
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
