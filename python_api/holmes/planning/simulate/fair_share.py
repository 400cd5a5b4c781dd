"""Max-min fair rates of flows (transfers, computations) that share links and processor cores."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

Flow = TypeVar("Flow", bound=Hashable)


def fair_rates(
    usage: Mapping[Flow, Mapping[str, float]],
    links: Mapping[str, float],
    weights: Mapping[Flow, float] | None = None,
    limits: Mapping[Flow, float] | None = None,
) -> dict[Flow, float]:
    """Rate of each flow. `usage[flow][link]`: what one unit of rate takes of a link (copies of a transfer that cross
    it); `links`: capacities; `limits`: the most a flow can have, where there is such a number.

    The most contended link is filled first, its flows are fixed, and so on with what is left: no flow can get more
    without taking from one that has less for its weight (1 where none is given).
    """
    weights, limits = weights or {}, limits or {}
    rates: dict[Flow, float] = {}
    left = {link: links[link] for flow in usage.values() for link in flow}
    open_flows = dict(usage)
    share = 0.0
    while open_flows:
        taken = dict.fromkeys(left, 0.0)
        for key, flow in open_flows.items():
            for link, count in flow.items():
                taken[link] += count * weights.get(key, 1.0)
        fills = ((left[link] / count, link) for link, count in taken.items() if count > 0)
        fill, tightest = min(fills, default=(math.inf, ""))
        least = min((limits[key] / weights.get(key, 1.0) for key in open_flows if key in limits), default=math.inf)
        share = max(share, min(fill, least))  # later links are never tighter: only rounding could say so
        for key in list(open_flows):
            weight = weights.get(key, 1.0)
            if least < fill:
                fixed = key in limits and limits[key] / weight <= share
            else:
                fixed = open_flows[key].get(tightest, 0.0) > 0
            if fixed:
                rates[key] = weight * share
                for link, count in open_flows.pop(key).items():
                    left[link] = max(left[link] - count * rates[key], 0.0)
    return rates
