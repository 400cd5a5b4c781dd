"""A plan and its topology as a job for the simulator."""

from __future__ import annotations

from holmes.cluster.topology import Topology
from holmes.planning.model.gpt import Transformer
from holmes.planning.plan.plan import Plan
from holmes.planning.simulate.job import Framework, Job, Place
from holmes_comm.errors import UsageError


def job_of_plan(
    plan: Plan,
    topology: Topology,
    model: Transformer,
    framework: Framework,
    *,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
) -> Job:
    """The job that runs this plan. Local. NICs count by class: a host's rails of one class together have its rate.

    What is None is as the plan says, micro-batches of one sample where it says nothing. Raises ValueError where no
    global batch is known, where the hosts of a stage have different numbers of its ranks, and as `Job` does.
    """
    global_batch = global_batch or plan.global_batch
    if global_batch is None:
        raise UsageError("the plan does not say its global_batch; pass global_batch=, the samples of a step")
    return Job(
        model=model,
        layers_per_stage=plan.layers_per_stage,
        places=tuple(_place(plan, topology, stage) for stage in range(plan.pipeline)),
        framework=framework,
        micro_batch=micro_batch or plan.micro_batch or 1,
        global_batch=global_batch,
        tensor=plan.tensor,
        schedule=schedule or plan.schedule,
        chunks=plan.chunks if chunks is None else chunks,
    )


def _place(plan: Plan, topology: Topology, stage: int) -> Place:
    ranks = plan.ranks_of_stage(stage)
    counts: dict[str, int] = {}
    for rank in ranks:
        name = topology.host_of(rank).name
        counts[name] = counts.get(name, 0) + 1
    if len(set(counts.values())) != 1:
        raise UsageError(
            f"the simulator needs equally many ranks of stage {stage} on each host, but there are {counts}"
        )
    first = ranks[0]
    cluster = topology.cluster_of(first)
    return Place(
        host=next(iter(counts)),
        hosts=len(counts),
        ranks_per_host=counts[next(iter(counts))],
        data_nic=plan.group_of("dp", first).nic_class or "none",
        pipeline_nic=plan.group_of("pp", first).nic_class or "none",
        cluster=cluster.name,
        cluster_nic=cluster.nic_class,
    )
