"""The plan: its ranks, hosts and NICs are this job's, and each group's NICs are of the class that it counts on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from holmes.planning.plan.plan import Plan
from holmes.tools.doctor.facts import JobFacts
from holmes.tools.doctor.finding import ERROR, Finding

_KINDS = ("tp", "dp", "dp_cp", "pp", "expt_dp")  # what a job cannot do without


def check_plan(job: JobFacts) -> Iterator[Finding]:
    """Every group of the plan finds its NICs, up, addressed, of one class. Nothing where there is no plan."""
    plan = job.plan
    if plan is None:
        return
    again = "make a new plan on these hosts (holmes plan), or start the ranks in the plan's order"
    if plan.world_size != len(job.ranks):
        problem = f"the plan is for {plan.world_size} ranks, and the job has {len(job.ranks)}"
        yield Finding(ERROR, "plan", job.hosts[0].name, "", problem, again)
        return
    for host in plan.hosts:
        for rank in host.ranks:
            if job.host_of(rank) != host.name:
                problem = f"rank {rank} runs here, and the plan has it on {host.name}"
                yield Finding(ERROR, "plan", job.host_of(rank), "", problem, again)
    for (name, nic, nic_class), kinds in _planned_nics(plan, job).items():
        facts = next((facts for facts in job.hosts_by_name[name].wires if facts.name == nic), None)
        groups = f"the plan's {', '.join(kinds)} groups"
        if facts is None:
            problem = f"{groups} use this NIC, which is not there, down or without address"
            yield Finding(ERROR, "plan", name, nic, problem, f"bring it up (holmes nics), or {again}")
        elif facts.nic_class != nic_class and not (nic_class == "ethernet" and facts.nic_class.startswith("roce")):
            problem = f"{groups} count on class {nic_class}, and this NIC is of class {facts.nic_class}"
            yield Finding(ERROR, "plan", name, nic, problem, f"look at its driver and link layer, or {again}")


def _planned_nics(plan: Plan, job: JobFacts) -> dict[tuple[str, str, str], list[str]]:
    """(host, NIC, class that is counted on) -> kinds of groups that use it."""
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for kind in _KINDS:
        for group in plan.groups(kind):
            for rank, nics in group.nics.items():
                for nic in nics:
                    kinds = found[job.host_of(rank), nic, group.nic_class or ""]
                    if kind not in kinds:
                        kinds.append(kind)
    return found
