"""Holmes: training over clusters whose network cards differ. What training frameworks and the command line call."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holmes import groups, model, partition, plan, search, simulate
    from holmes.groups.rank_grid import KINDS
    from holmes.overlap import DistributedOptimizer
    from holmes.pipeline import PipelineStage, pipeline_schedule, pipeline_stages
    from holmes.plan.plan import Plan, plan_for
    from holmes.plan.proof import Proof, check
    from holmes.plan.workable import workable_plan
    from holmes.recovery import Generation, run_elastic
    from holmes.session import gather_topology, make_plan
    from holmes.topology import Topology
    from holmes.torch_groups import ProcessGroups, process_groups

try:
    __version__ = version("holmes-comm")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"

_HOMES = {  # imported when first used: planning needs no torch
    "DistributedOptimizer": "holmes.overlap",
    "Generation": "holmes.recovery",
    "KINDS": "holmes.groups.rank_grid",
    "PipelineStage": "holmes.pipeline",
    "Plan": "holmes.plan.plan",
    "ProcessGroups": "holmes.torch_groups",
    "Proof": "holmes.plan.proof",
    "Topology": "holmes.topology",
    "check": "holmes.plan.proof",
    "gather_topology": "holmes.session",
    "make_plan": "holmes.session",
    "pipeline_schedule": "holmes.pipeline",
    "pipeline_stages": "holmes.pipeline",
    "plan_for": "holmes.plan.plan",
    "process_groups": "holmes.torch_groups",
    "run_elastic": "holmes.recovery",
    "workable_plan": "holmes.plan.workable",
}

_PACKAGES = ("groups", "model", "partition", "plan", "search", "simulate")

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
    if name in _PACKAGES:
        return import_module(f"holmes.{name}")
    raise AttributeError(f"module 'holmes' has no attribute {name!r}")
