"""A Plan as FlagScale's heterogeneous training: one process mesh per cluster, layers per stage, and the host file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from holmes.cluster.topology import Cluster
from holmes.planning.plan.plan import Plan
from holmes.training.integrations.megatron import assumed
from holmes.training.integrations.requirements import NotExpressible, require_one, require_trainer
from holmes.training.integrations.start_order import hosts_in_order
from holmes.words import short


def flagscale_config(plan: Plan) -> dict[str, Any]:
    """The `system` part of FlagScale's train YAML, for ranks numbered by the host file. Local.

    Raises NotExpressible where a stage lies in several clusters, for interleaving, another schedule than 1F1B, experts
    beside context parallelism, and where no order of hosts numbers the ranks as the plan does.
    """
    require_trainer(plan, "flagscale")
    require_one(plan, "FlagScale", "chunks", "cannot interleave heterogeneous pipelines")
    if plan.expert > 1 and plan.context > 1:
        raise NotExpressible(
            f"the plan has context={plan.context} and expert={plan.expert}, but FlagScale allows one of them above 1; "
            "plan again with context=1 or expert=1"
        )
    stages = [(cluster, _stages_in(plan, cluster)) for cluster in _in_stage_order(plan)]
    meshes = [[plan.tensor, plan.context, plan.expert, plan.data, count] for _, count in stages]
    system: dict[str, Any] = {
        "tensor_model_parallel_size": plan.tensor,
        "pipeline_model_parallel_size": plan.pipeline,
        "context_parallel_size": plan.context,
        "expert_model_parallel_size": plan.expert,
        "hetero": {
            "enable_hetero": True,
            "hetero_pipeline_layer_split": list(plan.layers_per_stage),
            "hetero_process_meshes": [size for mesh in meshes for size in mesh],
            "hetero_device_types": [_type(cluster) for cluster, _ in stages],
            "hetero_current_device_type": _type(stages[0][0]),  # FlagScale puts each host's own there
        },
    }
    system |= {name.replace("-", "_"): value for name, value in assumed(plan).items()}
    if plan.expert > 1:
        system["hetero"]["expert_tensor_parallel_size_per_process_mesh"] = [plan.expert_tensor] * len(meshes)
    return system


def flagscale_overrides(plan: Plan) -> list[str]:
    """What FlagScale's run.py is told beside its own configuration, in Hydra's words (`++train.system.x=1`). Local.

    Raises NotExpressible as `flagscale_config`.
    """
    model = {
        "num_layers": sum(plan.layers_per_stage),
        "micro_batch_size": plan.micro_batch,
        "global_batch_size": plan.global_batch,
    }
    sections = {
        "train": {"system": flagscale_config(plan), "model": model},
        "experiment": {"runner": {"rdzv_backend": "static"}},  # the only one that heterogeneous training has
    }
    return [f"++{name}={json.dumps(value, separators=(',', ':'))}" for name, value in _leaves(sections, "")]


def _leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, value


def flagscale_hostfile(plan: Plan) -> str:
    """FlagScale's host file: a line for each host, in the plan's order. Names that do not resolve must be replaced.

    FlagScale numbers ranks by it. The device types in it are the plan's clusters. Local; raises as `flagscale_config`.
    """
    cluster_of = {host: cluster for cluster in _in_stage_order(plan) for host in cluster.hosts}
    return "".join(f"{host} slots={ranks} type={_type(cluster_of[host])}\n" for host, ranks in hosts_in_order(plan))


def _type(cluster: Cluster) -> str:
    return cluster.name.replace(" ", "-")  # one word in the host file


def _in_stage_order(plan: Plan) -> list[Cluster]:
    """The clusters, first stage first. FlagScale sorts ranks by them, then by number: that must be the plan's order."""
    hosts_in_order(plan)
    place = plan.grid.place
    clusters = sorted(plan.clusters, key=lambda cluster: min(int(place[rank]) for rank in cluster.ranks))
    theirs = [place for cluster in clusters for place in sorted(int(plan.grid.place[rank]) for rank in cluster.ranks)]
    if theirs != list(range(plan.world_size)):
        raise NotExpressible(
            f"ranks of several clusters alternate in the plan's order {short(plan.order)}, but FlagScale sorts ranks "
            "by cluster; plan again without stages that span clusters"
        )
    return clusters


def _stages_in(plan: Plan, cluster: Cluster) -> int:
    width = plan.world_size // plan.pipeline
    if len(cluster.ranks) % width:
        raise NotExpressible(
            f"{cluster.name} has {len(cluster.ranks)} ranks, not a multiple of a stage's {width}, so a stage lies in "
            "several clusters; FlagScale's meshes are whole stages: plan again with another number of stages"
        )
    return len(cluster.ranks) // width
