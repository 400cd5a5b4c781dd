"""A Plan as text for a framework: what `holmes plan export` prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import yaml

from holmes.planning.plan.plan import Plan
from holmes.training.integrations.deepspeed import deepspeed_partition
from holmes.training.integrations.flagscale import flagscale_config, flagscale_hostfile
from holmes.training.integrations.megatron import megatron_arguments
from holmes.training.integrations.start_order import renumbered
from holmes.training.integrations.torchtitan import torchtitan_parallelism
from holmes_comm.errors import UsageError


def export_plan(plan: Plan, form: str) -> str:
    """The plan in one of `FORMATS`, ending in a newline, for a job whose ranks are numbered in the plan's order. Local.

    `hosts_in_order` says in which order to start hosts for that. Raises NotExpressible where the framework has no words
    for the plan, ValueError for an unknown form.
    """
    if form not in FORMATS:
        raise UsageError(f"cannot export to {form!r}; it must be one of {', '.join(FORMATS)}")
    return FORMATS[form](plan).rstrip("\n") + "\n"


def _megatron(plan: Plan) -> str:
    return " ".join(megatron_arguments(plan))


def _deepspeed(plan: Plan) -> str:
    boundaries = deepspeed_partition(plan, layers_before=0, layers_after=0)
    stages = [{"first_layer": first, "layers": last - first} for first, last in pairwise(boundaries)]
    sizes = {"num_pp": plan.pipeline, "num_dp": plan.data, "num_mp": plan.tensor}
    batch = {"train_micro_batch_size_per_gpu": plan.micro_batch, "train_batch_size": plan.global_batch}
    config: dict[str, Any] = {name: size for name, size in batch.items() if size is not None}
    text: dict[str, Any] = {"topology": sizes, "transformer_layers": stages, "config": config}
    if plan.recomputation is not None:  # what the search counts on
        config["zero_optimization"] = {"stage": 1}
        text["pipeline_module"] = {"activation_checkpoint_interval": int(plan.recomputation == "full")}
    return json.dumps(text, indent=2)


def _torchtitan(plan: Plan) -> str:
    config = torchtitan_parallelism(renumbered(plan))
    if plan.recomputation is None:
        return json.dumps(config, indent=2)
    return json.dumps({"parallelism": config, "activation_checkpoint": {"mode": plan.recomputation}}, indent=2)


def _flagscale(plan: Plan) -> str:
    hosts = "".join(f"# {line}\n" for line in flagscale_hostfile(plan).splitlines())
    text = yaml.safe_dump({"system": flagscale_config(plan)}, sort_keys=False, default_flow_style=None)
    return f"# host file:\n{hosts}{text}"


def _json(plan: Plan) -> str:
    return json.dumps(plan.to_dict(), indent=2)


FORMATS: dict[str, Callable[[Plan], str]] = {
    "megatron": _megatron,
    "deepspeed": _deepspeed,
    "torchtitan": _torchtitan,
    "flagscale": _flagscale,
    "json": _json,
}
