"""Max-min fair rates of transfers that share links."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

Flow = TypeVar("Flow", bound=Hashable)


def fair_rates(usage: Mapping[Flow, Mapping[str, float]], links: Mapping[str, float]) -> dict[Flow, float]:
    """Bytes per second of each flow. `usage[flow][link]`: copies of the flow that cross a link; `links`: capacities.

    The most contended link is filled first, its flows are fixed, and so on with what is left: no flow can get more
    without taking from one that has less.
    """
    rates: dict[Flow, float] = {}
    left = {link: links[link] for flow in usage.values() for link in flow}
    open_flows = dict(usage)
    share = 0.0
    while open_flows:
        copies = dict.fromkeys(left, 0.0)
        for flow in open_flows.values():
            for link, count in flow.items():
                copies[link] += count
        fill, tightest = min((left[link] / count, link) for link, count in copies.items() if count > 0)
        share = max(share, fill)  # later links are never tighter: only rounding could say so
        for key in [key for key, flow in open_flows.items() if flow.get(tightest, 0.0) > 0]:
            for link, count in open_flows.pop(key).items():
                left[link] = max(left[link] - count * share, 0.0)
            rates[key] = share
    return rates
