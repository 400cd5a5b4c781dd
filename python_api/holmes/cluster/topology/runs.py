"""Hosts that differ in their number only, as one template: what makes the file of a large topology short."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from holmes.cluster.topology.parts import Host

_NUMBERED = re.compile(r"(.*?)(\d+)")


def runs(hosts: Sequence[Host]) -> Iterator[tuple[str, list[Host]]]:
    """The hosts in runs, each with the template of its names ("a{:03}"); runs of one host have their plain name.

    A run begins with number 0, its hosts are alike, without addresses, and their ranks are numbered on, also from the
    highest rank before the run: what reading such a template makes.
    """
    next_rank, start = 0, 0
    while start < len(hosts):
        end, template = start + 1, hosts[start].name
        pattern = _template(hosts[start])
        if pattern is not None and hosts[start].ranks[0] == next_rank:
            while end < len(hosts) and _goes_on(hosts[start], hosts[end], end - start, pattern):
                end += 1
            template = pattern if end > start + 1 else template
        yield template, list(hosts[start:end])
        next_rank = max(next_rank, hosts[end - 1].ranks[-1] + 1)
        start = end


def _template(host: Host) -> str | None:
    """The template that makes this host's name with number 0; None where the host cannot begin a run."""
    found = _NUMBERED.fullmatch(host.name)
    apart = host.host_id != host.name or any(port.address for port in host.ports)
    if apart or found is None or int(found[2]) != 0 or set(found[1]) & set("{}"):
        return None
    width = len(found[2])
    return found[1] + ("{}" if width == 1 else f"{{:0{width}}}")


def _goes_on(first: Host, host: Host, number: int, pattern: str) -> bool:
    per_host = len(first.ranks)
    start = first.ranks[0] + number * per_host
    return (
        host.name == host.host_id == pattern.format(number)
        and host.ranks == tuple(range(start, start + per_host))
        and (host.ports, host.gpu, host.gpu_memory_gib, host.gpu_tflops)
        == (first.ports, first.gpu, first.gpu_memory_gib, first.gpu_tflops)
    )
