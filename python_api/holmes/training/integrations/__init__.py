"""A Plan in the form each training framework wants. Frameworks are imported when a function needs them, not before.

`start_order` and `nics` serve all of them; one file per framework holds the rest. What a framework cannot express is a
`NotExpressible`, which says what and what to do instead; nothing is dropped silently.
"""

from holmes.training.integrations.deepspeed import deepspeed_partition, deepspeed_pipeline_module, deepspeed_topology
from holmes.training.integrations.device_mesh import device_mesh
from holmes.training.integrations.export import FORMATS, export_plan
from holmes.training.integrations.flagscale import flagscale_config, flagscale_hostfile
from holmes.training.integrations.megatron import (
    initialize_megatron,
    megatron_arguments,
    megatron_groups,
    megatron_layout,
    megatron_process_groups,
)
from holmes.training.integrations.nics import planned_nics
from holmes.training.integrations.requirements import NotExpressible
from holmes.training.integrations.start_order import hosts_in_order, renumbered, start_in_plan_order
from holmes.training.integrations.torchtitan import torchtitan_module_fqns, torchtitan_parallelism

__all__ = [
    "FORMATS",
    "NotExpressible",
    "deepspeed_partition",
    "deepspeed_pipeline_module",
    "deepspeed_topology",
    "device_mesh",
    "export_plan",
    "flagscale_config",
    "flagscale_hostfile",
    "hosts_in_order",
    "initialize_megatron",
    "megatron_arguments",
    "megatron_groups",
    "megatron_layout",
    "megatron_process_groups",
    "planned_nics",
    "renumbered",
    "start_in_plan_order",
    "torchtitan_module_fqns",
    "torchtitan_parallelism",
]
