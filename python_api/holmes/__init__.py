"""Holmes: training over clusters whose network cards differ. What training frameworks and the command line call."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holmes.cluster.topology import Topology
    from holmes.planning import groups, model, partition, plan, search, simulate
    from holmes.planning.groups.rank_grid import KINDS
    from holmes.planning.plan.plan import Plan, plan_for
    from holmes.planning.plan.proof import Proof, check
    from holmes.planning.plan.workable import workable_plan
    from holmes.training.overlap import DistributedOptimizer
    from holmes.training.pipeline import PipelineStage, pipeline_schedule, pipeline_stages
    from holmes.training.process_groups import ProcessGroups, process_groups
    from holmes.training.recovery import Generation, run_elastic
    from holmes.training.session import gather_topology, make_plan

    __version__: str

_HOMES = {  # imported when first used: planning needs no torch
    "DistributedOptimizer": "holmes.training.overlap",
    "Generation": "holmes.training.recovery",
    "KINDS": "holmes.planning.groups.rank_grid",
    "PipelineStage": "holmes.training.pipeline",
    "Plan": "holmes.planning.plan.plan",
    "ProcessGroups": "holmes.training.process_groups",
    "Proof": "holmes.planning.plan.proof",
    "Topology": "holmes.cluster.topology",
    "check": "holmes.planning.plan.proof",
    "gather_topology": "holmes.training.session",
    "make_plan": "holmes.training.session",
    "pipeline_schedule": "holmes.training.pipeline",
    "pipeline_stages": "holmes.training.pipeline",
    "plan_for": "holmes.planning.plan.plan",
    "process_groups": "holmes.training.process_groups",
    "run_elastic": "holmes.training.recovery",
    "workable_plan": "holmes.planning.plan.workable",
}

_PLANNING = ("groups", "model", "partition", "plan", "search", "simulate")

__all__ = [
    "KINDS",
    "DistributedOptimizer",
    "Generation",
    "PipelineStage",
    "Plan",
    "ProcessGroups",
    "Proof",
    "Topology",
    "__version__",
    "check",
    "gather_topology",
    "groups",
    "make_plan",
    "model",
    "partition",
    "pipeline_schedule",
    "pipeline_stages",
    "plan",
    "plan_for",
    "process_groups",
    "run_elastic",
    "search",
    "simulate",
    "workable_plan",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _PLANNING:
        return import_module(f"holmes.planning.{name}")
    if name == "__version__":
        return _version()
    raise AttributeError(f"module 'holmes' has no attribute {name!r}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("holmes-comm")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+source"
