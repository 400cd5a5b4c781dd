"""A rank on the testbed: discovers, plans, hands the plan to Megatron-core, and sends something through its groups."""

import json

import torch
import torch.distributed as dist
from megatron.core import parallel_state

import holmes
from holmes.training.integrations import initialize_megatron
from holmes_comm.torch_backend import connections


def used(group):
    """The NICs, or "shm", that carried something."""
    rows = [row for row in connections(group) if row["sent_bytes"]]
    return sorted({"shm" if row["transport"] == "shm" else row["interface"] for row in rows})


def main():
    torch.set_num_threads(1)
    dist.init_process_group("holmes")
    rank = dist.get_rank()
    plan = holmes.make_plan(model_layers=7, pipeline=2)
    groups = initialize_megatron(plan)
    for kind in ("tp", "dp", "pp", "mp", "dp_cp", "expt_dp"):
        value = torch.full((1000,), float(rank))
        dist.all_reduce(value, group=getattr(groups, kind))
        assert value[0].item() == sum(plan.group_of(kind, rank).ranks), kind
    # A stage sends to the next one by Megatron's own idea of who that is.
    if not parallel_state.is_pipeline_last_stage():
        dist.send(torch.tensor([rank]), parallel_state.get_pipeline_model_parallel_next_rank(), group=groups.pp)
    if not parallel_state.is_pipeline_first_stage():
        received = torch.zeros(1, dtype=torch.int64)
        dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank(), group=groups.pp)
        pipeline = plan.group_of("pp", rank).ranks
        assert received.item() == pipeline[pipeline.index(rank) - 1]
    gloo = parallel_state.get_data_parallel_group_gloo()
    assert dist.get_backend(gloo) == "holmes"
    dist.barrier()
    print(json.dumps({"rank": rank, **{kind: used(getattr(groups, kind)) for kind in ("tp", "dp", "pp")}}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
