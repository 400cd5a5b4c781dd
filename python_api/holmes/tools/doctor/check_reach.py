"""Reach: who cannot connect to whom, and whether a wire, a firewall or an address is to blame; MTU; clocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from holmes.tools.doctor.facts import HostFacts, JobFacts, NicFacts, Trial
from holmes.tools.doctor.finding import ERROR, NOTE, WARNING, Finding
from holmes.words import some

#: What a topology's findings (holmes.cluster.topology.contradictions, measured) mean for a job.
_SEVERITY = {"class": ERROR, "unreachable": ERROR, "below line rate": NOTE}
_CLOCK_TOLERANCE_S = 1.0


def check_topology(job: JobFacts) -> Iterator[Finding]:
    """What the topology says: NICs of the wrong class for their wire, out of reach, alone, slow."""
    for found in job.topology.findings:
        severity = _SEVERITY.get(found.kind, WARNING)
        yield Finding(severity, found.kind, found.host, found.nic, found.problem, found.fix)


def check_connections(job: JobFacts) -> Iterator[Finding]:
    """Connections between neighbours: a failed one is laid to the target, unless the source reaches nobody at all."""
    told = {(found.host, found.nic) for found in job.topology.findings if found.kind == "unreachable"}
    outcomes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for trial in job.trials:
        outcomes[trial.source, trial.source_nic].append(trial.outcome)
    stuck = {place for place, all_of_it in outcomes.items() if len(all_of_it) > 1 and "ok" not in all_of_it}
    by_target: dict[tuple[str, str, str, str], list[Trial]] = defaultdict(list)
    by_source: dict[tuple[str, str], list[Trial]] = defaultdict(list)
    for trial in job.trials:
        source, target = (trial.source, trial.source_nic), (trial.target, trial.target_nic)
        # Where the wire works, silence and refusal are the target's doing.
        wire_works = trial.outcome in ("refused", "other host") or (trial.outcome == "silent" and bool(trial.has_arp))
        if trial.outcome == "ok" or (not wire_works and {source, target} & told):
            continue
        if source in stuck and not wire_works:
            by_source[source].append(trial)
        else:
            by_target[trial.target, trial.target_nic, trial.outcome, str(trial.has_arp)].append(trial)
    for trials in by_target.values():
        yield _failed(trials)
    for (host, nic), trials in by_source.items():
        targets = some(f"{trial.target} {trial.target_nic}" for trial in trials)
        yield Finding(
            WARNING,
            "unreachable",
            host,
            nic,
            f"reaches none of {targets} in its own subnet {trials[0].subnet}",
            f"check cable, switch port, VLAN and routes (ip route get {trials[0].address}); two wires need two subnets",
        )


def _failed(trials: list[Trial]) -> Finding:
    first = trials[0]
    sources = some(dict.fromkeys(f"{trial.source} {trial.source_nic}" for trial in trials))
    listener = f"{first.address} port {first.port}"
    ports = "HOLMES_PORT_RANGE names the ports of Holmes, to open only these"
    if first.outcome == "refused":
        check, problem = "firewall", f"refuses connections of {sources} to {listener}, where holmes doctor listens"
        fix = f"let its firewall accept the job's subnet {first.subnet} (nft, iptables, firewalld); {ports}"
    elif first.outcome == "other host":
        check, problem = "duplicate address", f"at {listener}, {sources} reach another program or host than this one"
        fix = "look for the host that also has this address (arping -D), or a proxy between them"
    elif first.outcome == "silent" and first.has_arp:
        check, problem = "firewall", f"its wire works (ARP), but connections of {sources} to {listener} get no answer"
        fix = f"a firewall drops them there or on the way: let it accept subnet {first.subnet}; {ports}"
    else:
        check, problem = "unreachable", f"{sources} in the same subnet {first.subnet} do not reach {first.address}"
        if first.has_arp is False:
            problem += ", whose hardware address nobody tells (ARP)"
        fix = "check cable, switch port and VLAN; two wires need two subnets"
    return Finding(ERROR if check != "unreachable" else WARNING, check, first.target, first.target_nic, problem, fix)


def check_mtu(job: JobFacts) -> Iterator[Finding]:
    """NICs in one subnet have one MTU: larger packets vanish at the smaller one."""
    members: dict[str, list[tuple[HostFacts, NicFacts]]] = defaultdict(list)
    for host in job.hosts:
        for nic in host.wires:
            if nic.mtu is not None:
                members[nic.subnet].append((host, nic))
    for subnet, nics in members.items():
        counts = Counter(nic.mtu for _, nic in nics)
        if len(counts) < 2:
            continue
        most = counts.most_common(1)[0][1]
        wanted = max(mtu for mtu, count in counts.items() if count == most and mtu is not None)
        for host, nic in nics:
            if nic.mtu != wanted:
                yield Finding(
                    WARNING,
                    "mtu",
                    host.name,
                    nic.name,
                    f"MTU {nic.mtu}, and {counts[wanted]} other NICs in {subnet} have {wanted}; packets above the "
                    "smaller one are lost (RDMA, UDP) or cost retries (TCP)",
                    f"ip link set dev {nic.name} mtu {wanted}, and the same at its switch port",
                )


def check_clocks(job: JobFacts) -> Iterator[Finding]:
    """Clocks agree: logs and traces of different hosts are compared, certificates and deadlines expire."""
    for clock in job.clocks:
        if abs(clock.offset_s) - clock.error_s > _CLOCK_TOLERANCE_S:
            yield Finding(
                WARNING,
                "clock",
                clock.host,
                "",
                f"its clock is {abs(clock.offset_s):.1f} s {'ahead of' if clock.offset_s > 0 else 'behind'} rank 0's "
                f"host (+-{clock.error_s:.2g} s); above {_CLOCK_TOLERANCE_S:g} s logs and traces cannot be compared",
                "start a time service: systemctl enable --now chronyd",
            )
