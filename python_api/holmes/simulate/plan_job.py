"""A plan and its topology as a job for the simulator."""

from __future__ import annotations

from holmes.gpt import Transformer
from holmes.plan import Plan
from holmes.simulate.job import Framework, Job, Place
from holmes.topology import Topology


def job_of_plan(
    plan: Plan,
    topology: Topology,
    model: Transformer,
    framework: Framework,
    *,
    micro_batch: int,
    global_batch: int,
    schedule: str = "1f1b",
    chunks: int = 1,
) -> Job:
    """The job that runs this plan. Local. NICs count by class: a host's rails of one class together have its rate.

    Raises ValueError where the hosts of a stage have different numbers of its ranks, and as `Job` does.
    """
    return Job(
        model=model,
        layers_per_stage=plan.layers_per_stage,
        places=tuple(_place(plan, topology, stage) for stage in range(plan.pipeline)),
        framework=framework,
        micro_batch=micro_batch,
        global_batch=global_batch,
        tensor=plan.tensor,
        schedule=schedule,
        chunks=chunks,
    )


def _place(plan: Plan, topology: Topology, stage: int) -> Place:
    ranks = [rank for rank in range(plan.world_size) if plan.stage_of(rank) == stage]
    counts: dict[str, int] = {}
    for rank in ranks:
        name = topology.host_of(rank).name
        counts[name] = counts.get(name, 0) + 1
    if len(set(counts.values())) != 1:
        raise ValueError(
            f"the simulator needs equally many ranks of stage {stage} on each host, but there are {counts}"
        )
    first = ranks[0]
    return Place(
        host=next(iter(counts)),
        hosts=len(counts),
        ranks_per_host=counts[next(iter(counts))],
        data_nic=plan.group_of("dp", first).nic_class or "none",
        pipeline_nic=plan.group_of("pp", first).nic_class or "none",
    )
