"""From a running job to its diagnosis, in one collective call."""

from __future__ import annotations

from typing import Any

from holmes.cluster.probe import Exchange, discover_topology
from holmes.planning.plan.plan import Plan
from holmes.tools.doctor.clock import compare_clocks
from holmes.tools.doctor.collect import collect
from holmes.tools.doctor.diagnose import Diagnosis, diagnose
from holmes.tools.doctor.facts import JobFacts, RankFacts, gather_hosts
from holmes.tools.doctor.trials import try_connections


def examine(
    store: Any,
    rank: int,
    size: int,
    name: str,
    timeout_s: float = 3.0,
    measure_s: float = 0.0,
    plan: Plan | None = None,
) -> Diagnosis | None:
    """Collective over `size` ranks. The diagnosis on rank 0, None on the others.

    `name` must be new in the store; `timeout_s` bounds one connection attempt, `measure_s` (0: nothing is measured) the
    measurement of rates, which in all takes about twice that. `plan`, on rank 0: the one that the job will run.
    """
    exchange = Exchange(store, rank, size, f"{name}/facts")
    ranks = [RankFacts.from_dict(facts) for facts in exchange.all_gather(collect(rank).to_dict())]
    hosts = gather_hosts(ranks)
    topology = discover_topology(store, rank, size, f"{name}/topology", timeout_s, measure_s)
    trials = try_connections(exchange, hosts, timeout_s)
    clocks = compare_clocks(exchange, store, f"{name}/clock", hosts)
    return diagnose(JobFacts(ranks, hosts, topology, trials, clocks, plan)) if rank == 0 else None


def examine_here(plan: Plan | None = None) -> Diagnosis:
    """Local. The diagnosis of this host alone: what needs other hosts, as the plan does, is named as left out."""
    facts = collect(0)
    return diagnose(JobFacts([facts], gather_hosts([facts]), plan=plan))
