"""All ranks' results on rank 0; ranks that are gone do not keep it waiting."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

from holmes.cluster.topology import Topology
from holmes.lab.stress.result import RankResult, StressResult


def gather_results(
    store: Any, size: int, name: str, mine: RankResult, topology: Topology, wait_s: float
) -> StressResult | None:
    """Collective, for those that are left: the whole result on rank 0, None on the others. Bounded by `wait_s`."""
    store.set(f"{name}/result/{mine.rank}", json.dumps(mine.to_dict()))
    if mine.rank != 0:
        return None
    deadline_s = time.monotonic() + wait_s
    found, missing = [], []
    for rank in range(size):
        key = f"{name}/result/{rank}"
        try:
            store.wait([key], timedelta(seconds=max(deadline_s - time.monotonic(), 0.01)))
            found.append(RankResult.from_dict(json.loads(store.get(key))))
        except RuntimeError:  # torch's DistStoreError: it did not come in time
            missing.append(rank)
    classes = {(host.name, port.name): port.nic_class for host in topology.hosts for port in host.ports}
    return StressResult(tuple(found), tuple(missing), classes)
