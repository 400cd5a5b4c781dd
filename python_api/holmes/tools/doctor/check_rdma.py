"""RDMA: ports that cannot be used, clusters whose hosts have unequal NICs, GID indices, locked memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from holmes.cluster.topology import RDMA_CLASSES
from holmes.tools.doctor.facts import HostFacts, JobFacts, NicFacts
from holmes.tools.doctor.finding import ERROR, NOTE, WARNING, Finding
from holmes.words import some

_IPV4_MAPPED = "0000:0000:0000:0000:0000:ffff:"
_MEMLOCK_ENOUGH_BYTES = 1 << 40
_GID_INDEX = "HOLMES_RDMA_GID_INDEX"


def rdma_nics(host: HostFacts) -> list[NicFacts]:
    """All RDMA NICs of a host, usable or not."""
    return [nic for nic in host.facts.nics if nic.nic_class in RDMA_CLASSES and nic.kind != "virtual_function"]


def check_ports(job: JobFacts) -> Iterator[Finding]:
    """Every RDMA port is active, and its interface is up and has an address."""
    for host in job.hosts:
        for nic in rdma_nics(host):
            if not nic.is_up:
                problem = f"its RDMA port is {nic.state!r}, not active"
                fix = "look at cable and switch port (ibstat); on InfiniBand a subnet manager must run (sminfo)"
            elif not nic.has_interface:
                if host.facts.variables.get("HOLMES_TRANSPORT") != "rdma":
                    problem = "it has no network interface: TCP does not go over it, only what is sent by verbs"
                    fix = "nothing, if verbs are enough; else load its driver for IP (ib_ipoib)"
                    yield Finding(NOTE, "rdma port", host.name, nic.name, problem, fix)
                continue
            elif not nic.is_netdev_up:
                problem, fix = "its RDMA port is active, but its interface is down", f"ip link set dev {nic.name} up"
            elif not nic.address and not nic.master:
                problem = "it has no IP address, by which Holmes finds out who reaches whom"
                fix = f"ip address add ADDRESS/PREFIX dev {nic.name}, in a subnet of its own for each fabric"
            else:
                continue
            yield Finding(WARNING, "rdma port", host.name, nic.name, problem, fix)


def check_classes(job: JobFacts) -> Iterator[Finding]:
    """One NIC class in each cluster: as many NICs of it on each host; no single host without any; labels that fit."""
    by_name = {host.name: host for host in job.hosts}
    for cluster in job.topology.clusters:
        if cluster.nic_class not in RDMA_CLASSES:
            continue
        counts = {
            name: sum(nic.nic_class == cluster.nic_class for nic in by_name[name].wires) for name in cluster.hosts
        }
        most = max(counts.values())
        for name, count in counts.items():
            if count < most:
                yield Finding(
                    WARNING,
                    "nic class",
                    name,
                    "",
                    f"{count} usable NICs of class {cluster.nic_class}, where other hosts of {cluster.name} "
                    f"have {most}: their groups use only what all share",
                    "look for the missing ones with `holmes nics` and ibstat on this host",
                )
    without = [host.name for host in job.hosts if not any(nic.nic_class in RDMA_CLASSES for nic in host.wires)]
    if len(without) == 1 < len(job.hosts):
        problem = "no usable RDMA NIC, which all other hosts of the job have: groups with it fall back to Ethernet"
        fix = "look for its NICs with `holmes nics`, `rdma link` and ibstat; load their driver"
        yield Finding(WARNING, "nic class", without[0], "", problem, fix)
    yield from _labels(job)


def _labels(job: JobFacts) -> Iterator[Finding]:
    """Hosts that HOLMES_CLUSTER puts into one cluster share their best class of NIC."""
    labelled: dict[str, dict[str, HostFacts]] = defaultdict(dict)
    for facts in job.ranks:
        if label := facts.variables.get("HOLMES_CLUSTER"):
            host = job.by_rank[facts.rank]
            labelled[label][host.name] = host
    for label, hosts in labelled.items():
        classes = {name: {nic.nic_class for nic in host.wires} for name, host in hosts.items()}
        best = {
            name: next((nic_class for nic_class in RDMA_CLASSES if nic_class in found), "ethernet")
            for name, found in classes.items()
        }
        common = Counter(best.values()).most_common(1)[0][0]
        for name, nic_class in best.items():
            if common not in classes[name]:
                others = some(other for other, its in best.items() if its == common)
                yield Finding(
                    ERROR,
                    "nic class",
                    name,
                    "",
                    f"HOLMES_CLUSTER={label} groups it, of class {nic_class}, with {others}, of class {common}: their "
                    "group falls back to Ethernet",
                    "give it the label of the cluster that it is wired to, or bring its NIC up",
                )


def check_gids(job: JobFacts) -> Iterator[Finding]:
    """RoCE: a RoCE v2 entry for the IPv4 address in each NIC's GID table, under one index everywhere."""
    indices: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for host in job.hosts:
        for nic in host.wires:
            if nic.nic_class not in ("roce_v1", "roce_v2"):
                continue
            index = roce_v2_index(nic)
            if index is not None:
                indices[index].append((host.name, nic.name))
            elif nic.gids and ":" not in nic.ip:
                yield Finding(
                    ERROR,
                    "gid",
                    host.name,
                    nic.name,
                    f"none of its {len(nic.gids)} GIDs is RoCE v2 with an IPv4 address; routed RoCE and NCCL need one",
                    f"give {nic.name} its IPv4 address before the driver loads, and allow RoCE v2 (cma_roce_mode)",
                )
    if len(indices) > 1:
        usual = max(indices, key=lambda index: len(indices[index]))
        for index, places in indices.items():
            for name, interface in places if index != usual else ():
                yield Finding(
                    WARNING,
                    "gid",
                    name,
                    interface,
                    f"its RoCE v2 IPv4 GID has index {index}, and {len(indices[usual])} other NICs have {usual}; one "
                    "NCCL_IB_GID_INDEX cannot fit both",
                    "leave NCCL_IB_GID_INDEX unset (NCCL 2.21 and later choose for each NIC), or set it per host",
                )


def check_gid_types(job: JobFacts) -> Iterator[Finding]:
    """RoCE by verbs: the GIDs that a subnet's NICs use are of one type."""
    used: dict[str, list[tuple[HostFacts, NicFacts, int, str]]] = defaultdict(list)
    for host in job.hosts:
        told = host.facts.variables.get(_GID_INDEX)
        for nic in host.wires:
            if nic.nic_class not in ("roce_v1", "roce_v2"):
                continue
            index = int(told) if told and told.isdecimal() else nic.gid_index
            kind = next((gid["type"] for gid in nic.gids if gid["index"] == index), None)
            if kind is not None and index is not None:
                used[nic.subnet].append((host, nic, index, kind))
            elif told and nic.gids:
                has = some(f"{gid['index']} ({gid['type']})" for gid in nic.gids)
                problem = f"{_GID_INDEX}={told} names no GID of it; it has {has}: RDMA over it is refused"
                yield Finding(ERROR, "gid", host.name, nic.name, problem, f"unset {_GID_INDEX}")
    for subnet, nics in used.items():
        kinds = Counter(kind for _, _, _, kind in nics)
        usual = kinds.most_common(1)[0][0]
        for host, nic, index, kind in nics:
            if kind != usual and (_GID_INDEX in host.facts.variables or roce_v2_index(nic) is not None):
                yield Finding(
                    ERROR if host.facts.variables.get("HOLMES_TRANSPORT") == "rdma" else WARNING,
                    "gid",
                    host.name,
                    nic.name,
                    f"RDMA uses its GID {index}, of type {kind}, and {kinds[usual]} other NICs in {subnet} use "
                    f"{usual}: they cannot talk",
                    f"unset {_GID_INDEX}, or set it on each host to a GID of type {usual} (`holmes nics` lists them)",
                )


def check_rdma_mtu(job: JobFacts) -> Iterator[Finding]:
    """The MTU that HCAs send with, as verbs tell it, is one for each class of NIC in a subnet."""
    members: dict[tuple[str, str], list[tuple[HostFacts, NicFacts]]] = defaultdict(list)
    for host in job.hosts:
        for nic in rdma_nics(host):
            if nic.is_up and nic.rdma_mtu is not None and not nic.master:
                members[nic.nic_class, nic.subnet].append((host, nic))
    for (nic_class, subnet), nics in members.items():
        most = max(nic.rdma_mtu or 0 for _, nic in nics)
        count = sum(nic.rdma_mtu == most for _, nic in nics)
        for host, nic in nics:
            if nic.rdma_mtu != most:
                where = f"in {subnet}" if subnet else f"of class {nic_class}"
                yield Finding(
                    WARNING,
                    "mtu",
                    host.name,
                    nic.name,
                    f"its HCA sends {nic.rdma_mtu} bytes in a packet, and {count} other NICs {where} {most}; pairs "
                    "with it take the smaller, and are slower",
                    "raise the MTU of its interface (RoCE) or of its partition (InfiniBand, the subnet manager)",
                )


def roce_v2_index(nic: NicFacts) -> int | None:
    """The lowest index of a RoCE v2 GID that holds an IPv4 address."""
    found = (gid["index"] for gid in nic.gids if "v2" in gid["type"] and gid["gid"].startswith(_IPV4_MAPPED))
    return min(found, default=None)


def check_locked_memory(job: JobFacts) -> Iterator[Finding]:
    """RDMA needs locked memory: all buffers that a NIC reads and writes."""
    for facts in job.ranks:
        host, limit = job.by_rank[facts.rank], facts.memlock_limit_bytes
        if limit is None or limit >= _MEMLOCK_ENOUGH_BYTES or not rdma_nics(host):
            continue
        text = f"{limit / 2**20:g} MiB of locked memory are allowed (ulimit -l)"
        fix = "memlock unlimited in /etc/security/limits.conf, LimitMEMLOCK=infinity for slurmd or kubelet"
        if facts.emulated:
            yield Finding(NOTE, "locked memory", host.name, "", f"{text}; enough here, where RDMA is emulated", fix)
        else:
            problem = f"{text}; RDMA registers every buffer and fails above that"
            yield Finding(ERROR, "locked memory", host.name, "", problem, fix)
