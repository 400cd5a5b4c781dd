"""The checks in their order, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from holmes.tools.doctor import check_addresses, check_limits, check_plan, check_rdma, check_reach, check_software
from holmes.tools.doctor.facts import JobFacts
from holmes.tools.doctor.finding import ERROR, Finding, merged

Check = Callable[[JobFacts], Iterable[Finding]]

#: What each check looks at, as `holmes doctor` says it, and whether it needs several hosts.
CHECKS: dict[str, tuple[Check, bool]] = {
    "NIC classes": (check_rdma.check_classes, True),
    "the plan's groups": (check_plan.check_plan, True),
    "RDMA ports": (check_rdma.check_ports, False),
    "reachability and class of each NIC": (check_reach.check_topology, True),
    "connections and firewalls": (check_reach.check_connections, True),
    "GID indices": (check_rdma.check_gids, False),
    "GIDs that RDMA uses": (check_rdma.check_gid_types, False),
    "MTU of RDMA": (check_rdma.check_rdma_mtu, True),
    "MTU": (check_reach.check_mtu, True),
    "duplicate addresses": (check_addresses.check_duplicates, False),
    "NICs in one subnet, rp_filter": (check_addresses.check_subnets, False),
    "host names": (check_addresses.check_host_names, False),
    "loopback": (check_addresses.check_loopback, False),
    "clocks": (check_reach.check_clocks, True),
    "variables": (check_software.check_variables, False),
    "versions of NCCL, Holmes, torch": (check_software.check_versions, False),
    "locked memory": (check_rdma.check_locked_memory, False),
    "descriptors": (check_limits.check_descriptors, False),
    "shared memory": (check_limits.check_shared_memory, False),
    "TCP buffers": (check_limits.check_tcp_buffers, True),
    "congestion control": (check_limits.check_congestion_control, False),
}

PLAN_CHECK = check_plan.check_plan  # only with a plan


@dataclass(frozen=True)
class Diagnosis:
    """What was looked at and found, worst first. `clusters`: each in words. `skipped`: checks that need more hosts."""

    hosts: tuple[str, ...]
    ranks: int
    clusters: tuple[str, ...]
    checked: tuple[str, ...]
    skipped: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """1 where something will go wrong, else 0."""
        return int(any(finding.severity == ERROR for finding in self.findings))

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        fields: dict[str, Any] = {name: value for name, value in vars(self).items() if name != "findings"}
        return {**fields, "findings": [vars(finding) for finding in self.findings], "exit_code": self.exit_code}


def diagnose(job: JobFacts) -> Diagnosis:
    """Runs every check that the job is large enough for. Local."""
    unfit = {name for name, (_, needs_hosts) in CHECKS.items() if needs_hosts and len(job.hosts) < 2}
    wanted = {name: check for name, (check, _) in CHECKS.items() if job.plan is not None or check is not PLAN_CHECK}
    found: list[Finding] = []
    for name, check in wanted.items():
        if name not in unfit:
            found += check(job)
    clusters = [
        f"{cluster.name}: {', '.join(cluster.hosts)} ({cluster.nic_class or 'alone'})"
        for cluster in job.topology.clusters
    ]
    return Diagnosis(
        hosts=tuple(host.name for host in job.hosts),
        ranks=len(job.ranks),
        clusters=tuple(clusters),
        checked=tuple(name for name in wanted if name not in unfit),
        skipped=tuple(name for name in wanted if name in unfit),
        findings=tuple(merged(found, len(job.hosts))),
    )
