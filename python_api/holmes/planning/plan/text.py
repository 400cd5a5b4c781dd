"""A plan in a few lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holmes import files
from holmes.planning.groups.group import Groups
from holmes.planning.groups.rank_text import short, to_text

if TYPE_CHECKING:
    from holmes.planning.plan.plan import Plan

_GROUPS_SHOWN = 16  # of one kind, one by one; of more, an example
_NAMES_SHOWN = 8  # of hosts, and of a group's NICs


def describe(plan: Plan) -> str:
    """Sizes, clusters, and the groups' ranks, NICs and reasons; many equal ones as an example."""
    sizes = {"tensor": plan.tensor, "context": plan.context, "data": plan.data, "pipeline": plan.pipeline}
    kept = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name != "context"]
    layers = files.plain(plan.layers_per_stage if plan.chunks == 1 else plan.layers_per_chunk)
    lines = [f"{plan.world_size} ranks = {' x '.join(kept)}, layers per stage {layers}, schedule {plan.schedule}"]
    if plan.expert > 1:
        lines.append(f"experts: expert {plan.expert} x tensor {plan.expert_tensor} x data {plan.expert_data}")
    if plan.global_batch is not None:
        lines.append(f"global batch {plan.global_batch}, micro-batch {plan.micro_batch or 'not given'}")
    if plan.recomputation is not None:
        lines.append(f"recomputation {plan.recomputation}")
    for cluster in plan.clusters:
        more = f", ... {len(cluster.hosts)} in all" if len(cluster.hosts) > _NAMES_SHOWN else ""
        hosts = ", ".join(cluster.hosts[:_NAMES_SHOWN]) + more
        lines.append(f"{cluster.name}: hosts {hosts}; ranks {to_text(cluster.ranks)}; {cluster.fabric}")
    for kind in ("tp", "cp", "dp", "pp", "ep", "expt_dp"):
        if plan.grid.size_of(kind) > 1 and (plan.expert > 1 or kind not in ("ep", "expt_dp")):
            lines += _groups(plan.groups(kind))
    return "\n".join([*lines, *plan.reasons])


def _groups(groups: Groups) -> list[str]:
    shown = groups if len(groups) <= _GROUPS_SHOWN else groups[:1]
    lines = []
    for group in shown:
        nics = ", ".join(f"{rank}: {'+'.join(names)}" for rank, names in list(group.nics.items())[:_NAMES_SHOWN])
        lines.append(f"{group.kind} {short(group.ranks)}: {f'{nics}; ' if nics else ''}{group.reason}")
    if len(groups) > len(shown):
        lines[0] = f"{len(groups)} groups of kind {groups.kind}, such as {lines[0]}"
    return lines
