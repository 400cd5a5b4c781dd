"""Why: the search's result in lines for people, which a plan keeps."""

from __future__ import annotations

from collections.abc import Sequence

from holmes.planning.search.candidate import Candidate
from holmes.planning.search.machines import Assumptions, Machines
from holmes.planning.search.space import Choice

_GIB = 2**30
_NAMED = 6  # other values of one decision
_STATED = 1.15  # times the best step
SHOWN = 12  # candidates, of all that were simulated

#: What a person may want otherwise, as `Choice` and `Wanted` call it.
DECISIONS = ("schedule", "chunks", "recomputation", "tensor", "pipeline", "micro_batch")


def reasons_of(
    machines: Machines,
    assumptions: Assumptions,
    candidates: Sequence[Candidate],
    estimates: Sequence[tuple[Choice, float]],
    tried: int,
) -> tuple[str, ...]:
    """The best, what the simulated runners-up lose, what other decisions lose, and what was assumed."""
    best = candidates[0]
    lines = [
        f"best of {tried} choices, {len(estimates)} of which fit into memory; {len(candidates)} were simulated",
        f"best: {describe(machines, best)}",
    ]
    lines += [
        f"runner-up, step {_more(other.step_s, best.step_s)}: {describe(machines, other)}"
        for other in candidates[1:SHOWN]
    ]
    lines += _alternatives(candidates)
    lines += _assumed(machines, assumptions)
    return tuple(lines)


def describe(machines: Machines, candidate: Candidate) -> str:
    """A candidate in one line."""
    exposed = ", ".join(f"{kind} {time_s:.3g} s" for kind, time_s in candidate.exposed_s.items() if time_s > 0)
    warmup = "" if candidate.warmup is None else f", forwards first {list(candidate.warmup)}"
    order = f", clusters {order_text(machines, candidate.choice.order)}" if len(machines.clusters) > 1 else ""
    counts = sorted(set(candidate.layers_per_stage))
    layers = f"{counts[0]} layers a stage" if len(counts) == 1 else f"layers {list(candidate.layers_per_stage)}"
    return (
        f"{candidate.choice.text()}{warmup}{order}, {layers}: step {candidate.step_s:.4g} s, "
        f"{candidate.tflops_per_gpu:.4g} TFLOP/s per GPU, {candidate.samples_per_s:.4g} samples/s, "
        f"bubble {candidate.bubble_share:.1%}, exposed {exposed or 'none'}, "
        f"memory {candidate.memory_bytes / _GIB:.1f} of {candidate.memory_limit_bytes / _GIB:.1f} GiB "
        f"on stage {candidate.fullest_stage}, bottleneck link {candidate.bottleneck_link or 'none'}"
    )


def order_text(machines: Machines, order: tuple[int, ...]) -> str:
    """Names of the clusters, first stage first."""
    return " > ".join(machines.clusters[i].name for i in order)


def stated(candidates: Sequence[Candidate], name: str) -> dict[object, Candidate]:
    """What a decision gains: the best with each other value, of those that cost so little more that somebody may take
    them; `candidates`: best first. The best of what costs more was not looked for."""
    found: dict[object, Candidate] = {}
    for candidate in candidates:
        if candidate.step_s > _STATED * candidates[0].step_s or len(found) > _NAMED:
            break
        found.setdefault(getattr(candidate.choice, name), candidate)
    return {value: candidate for value, candidate in found.items() if candidate is not candidates[0]}


def _alternatives(candidates: Sequence[Candidate]) -> list[str]:
    best, lines = candidates[0], []
    for name in DECISIONS:
        texts = [f"{value} {_more(other.step_s, best.step_s)}" for value, other in stated(candidates, name).items()]
        if texts:
            mine = getattr(best.choice, name)
            lines.append(f"{name.replace('_', '-')} {mine}; the best with another: {', '.join(texts)}")
    return lines


def _assumed(machines: Machines, assumptions: Assumptions) -> list[str]:
    rates = sorted({cluster.tflops for cluster in machines.clusters})
    how = "measured" if assumptions.compute_tflops else f"{assumptions.efficiency:.0%} of the peak"
    lines = [f"assumed: GPUs reach {', '.join(f'{rate:.4g}' for rate in rates)} TFLOP/s inside a layer ({how})"]
    if any(cluster.tensor_gbps is None for cluster in machines.clusters):
        lines.append("assumed: exchanges of tensor groups are free, as no rate inside a host is known")
    for cluster in machines.clusters:
        if cluster.network is not None:
            lines.append(f"{cluster.name}: {cluster.network.rate.gbps:.4g} Gbit/s per host over {cluster.network.name}")
    if machines.pipeline is not None:
        lines.append(f"pipeline: {machines.pipeline.rate.gbps:.4g} Gbit/s per host over {machines.pipeline.name}")
    return lines


def _more(time_s: float, best_s: float) -> str:
    return f"{100 * (time_s / best_s - 1):+.1f} %"
