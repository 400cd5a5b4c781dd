"""Limits of the system: descriptors, shared memory, TCP's buffers and congestion control."""

from __future__ import annotations

from collections.abc import Iterator

from holmes.tools.doctor.facts import JobFacts
from holmes.tools.doctor.finding import ERROR, NOTE, WARNING, Finding

_SOCKETS_PER_PEER = 3  # docs/ranks.md: of each rail
_COMMUNICATORS = 4  # world, data, tensor, pipeline
_SHM_BYTES_PER_RANK = 32 << 20  # NCCL's and torch's loaders' common need
_WINDOW_SHARE = 2  # the kernel keeps half of a read buffer for its own book-keeping (tcp_adv_win_scale 1)
_LONG_S = 5e-3  # from this round trip on losses are paid for in whole seconds by reno


def check_descriptors(job: JobFacts) -> Iterator[Finding]:
    """Each rank may open the sockets of one communicator of all ranks (error), and of the usual four (warning)."""
    size = len(job.ranks)
    for facts in job.ranks:
        limit = facts.open_files_limit
        rails = _rails(facts.variables.get("HOLMES_NICS", ""))
        one = _SOCKETS_PER_PEER * (size - 1) * rails
        if limit is None or facts.open_files + one * _COMMUNICATORS <= limit:
            continue
        least = facts.open_files + one
        yield Finding(
            ERROR if least > limit else WARNING,
            "descriptors",
            job.host_of(facts.rank),
            "",
            f"{limit} descriptors are allowed (ulimit -Hn, up to which Holmes goes); a communicator of {size} ranks "
            f"over {rails} rails takes up to {one}, and {facts.open_files} are open",
            f"ulimit -Hn {1 << (facts.open_files + one * _COMMUNICATORS).bit_length()} before the job, or nofile in "
            "/etc/security/limits.conf",
        )


def _rails(selection: str) -> int:
    """Connections' multiplier in a NIC selection's text: rails times streams."""
    product = 1
    for word in selection.split(","):
        key, _, value = word.strip().partition(":")
        if key in ("rails", "streams") and value.isdecimal():
            product *= int(value)
    return product


def check_shared_memory(job: JobFacts) -> Iterator[Finding]:
    """Ranks of one host share memory: memfd for Holmes, /dev/shm for NCCL and torch's loaders."""
    for host in job.hosts:
        facts, count = host.facts, len(host.ranks)
        if facts.memfd_error:
            yield Finding(
                ERROR if count > 1 else NOTE,
                "shared memory",
                host.name,
                "",
                f"memfd_create does not work ({facts.memfd_error}); ranks of one host cannot share memory",
                "allow it in the container's seccomp profile, or set HOLMES_SHM=0 (TCP instead, slower)",
            )
        free, wanted = facts.shm_free_bytes, _SHM_BYTES_PER_RANK * count
        if free is None or free < wanted:
            has = "cannot be written" if free is None else f"has {free / 2**20:.0f} MiB free"
            yield Finding(
                WARNING,
                "shared memory",
                host.name,
                "",
                f"/dev/shm {has}; NCCL and torch's loaders want about {wanted >> 20} MiB for {count} ranks",
                "docker run --shm-size=16g (or --ipc=host); on a host: mount -o remount,size=16G /dev/shm",
            )


def check_tcp_buffers(job: JobFacts) -> Iterator[Finding]:
    """One connection fills its link: the kernel's largest buffers hold rate times round trip."""
    by_name = {host.name: host for host in job.hosts}
    for trial in job.trials:
        facts = by_name[trial.source].facts
        nic = next((nic for nic in facts.nics if nic.name == trial.source_nic), None)
        if trial.round_trip_s is None or nic is None or not nic.speed_gbps:
            continue
        needed = round(nic.speed_gbps * 1e9 / 8 * trial.round_trip_s)
        limits = (
            ("tcp_rmem", facts.tcp_read_max_bytes, needed * _WINDOW_SHARE),
            ("tcp_wmem", facts.tcp_write_max_bytes, needed),
        )
        for name, limit, wanted in limits:
            if limit is not None and limit < wanted:
                yield Finding(
                    WARNING,
                    "tcp buffers",
                    trial.source,
                    trial.source_nic,
                    f"net.ipv4.{name} allows {limit} bytes; {nic.speed_gbps:g} Gbit/s times a round trip of "
                    f"{trial.round_trip_s * 1e3:.2g} ms (to {trial.target}) needs {wanted} for one connection",
                    f'sysctl -w net.ipv4.{name}="4096 131072 {1 << wanted.bit_length()}", or more connections: '
                    "HOLMES_NICS=...,streams:4",
                )


def check_congestion_control(job: JobFacts) -> Iterator[Finding]:
    """Equal on all hosts, and not reno on long links."""
    used = {host.name: host.facts.congestion_control for host in job.hosts if host.facts.congestion_control}
    kinds = sorted({name for name in used.values() if name})
    far = max((trial.round_trip_s for trial in job.trials if trial.round_trip_s is not None), default=0.0)
    for host, name in used.items():
        if len(kinds) > 1:
            yield Finding(
                WARNING,
                "congestion control",
                host,
                "",
                f"uses {name}, and the job's hosts use {', '.join(kinds)}: they share links unfairly",
                "sysctl -w net.ipv4.tcp_congestion_control=NAME everywhere, or HOLMES_TCP_CONGESTION=NAME for the job",
            )
        elif name == "reno" and far > _LONG_S:
            yield Finding(
                WARNING,
                "congestion control",
                host,
                "",
                f"uses reno, over a round trip of {far * 1e3:.3g} ms: slow to come back after a loss",
                "HOLMES_TCP_CONGESTION=cubic (or bbr, where losses are common)",
            )
