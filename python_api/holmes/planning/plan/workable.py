"""A plan for whoever is there: the sizes asked for where they fit, else the nearest that do."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from holmes.cluster.topology import Topology
from holmes.planning.groups.shares import SPEED, share_unit, shares_problem
from holmes.planning.groups.sizes import Limits, Sizes, batch_problem, divisors, nearest, problems
from holmes.planning.plan.plan import Plan, plan_for

_log = logging.getLogger(__name__)
_SIZES = ("tensor", "context", "pipeline", "expert", "expert_tensor", "chunks")


def workable_plan(topology: Topology, *, model_layers: int, **options: Any) -> Plan:
    """As `plan_for`, same arguments; where they do not fit, with the nearest sizes that do.

    The plan's `reasons` say what was changed and why, and so does a warning. Before the global batch is changed, other
    numbers of stages are tried that it divides by; where none do, the nearest batch to the nearest sizes is taken.
    Layers given for each of another number of stages are split evenly, a `warmup` or `micro_batch_group` for these is
    left out, as are `turns`, and `data_shares` in numbers. Stages span clusters only where nothing else fits. Local and
    deterministic. Raises ValueError, as `plan_for` does, where nothing fits.
    """
    try:
        return plan_for(topology, model_layers=model_layers, **options)
    except ValueError as error:
        refusal = error
    wanted = Sizes(**{name: options[name] for name in _SIZES if options.get(name) is not None})
    batch = options.get("global_batch")
    for spans in dict.fromkeys((bool(options.get("span_clusters")), True)):
        limits = Limits.of(topology, model_layers, span_clusters=spans)
        near = nearest(limits, wanted)
        if near is None:
            continue
        sizes, fitting_batch = near, batch
        if batch is not None:
            micro_batch, schedule = options.get("micro_batch"), options.get("schedule") or "1f1b"
            samples = _Samples(batch, micro_batch, schedule, options.get("data_shares") == SPEED)
            sizes, fitting_batch = _with_batch(limits, near, wanted.pipeline, samples)
        change = sizes.text() + (f", global_batch={fitting_batch}" if fitting_batch != batch else "")
        note = f"{change} instead of what was asked for: {str(refusal).partition('. Fix:')[0]}"
        _log.warning("plan for %d ranks: %s", topology.world_size, note)
        changed = {**options, **dataclasses.asdict(sizes), "global_batch": fitting_batch, "span_clusters": spans}
        changed["turns"] = None  # of other pipelines
        if changed.get("data_shares") != SPEED:
            changed["data_shares"] = None
        changed["reasons"] = [*options.get("reasons", ()), note]
        if (sizes.pipeline, sizes.chunks) != (wanted.pipeline, wanted.chunks):
            changed |= {"layers_per_stage": None, "layers_per_chunk": None, "warmup": None, "micro_batch_group": None}
        return plan_for(topology, model_layers=model_layers, **changed)
    raise refusal


@dataclasses.dataclass(frozen=True)
class _Samples:
    """Of a step: what was asked for."""

    batch: int
    micro_batch: int | None
    schedule: str
    is_by_speed: bool  # replicas need not have equally many

    def problem(self, limits: Limits, sizes: Sizes) -> tuple[str, int] | None:
        """See `batch_problem`, and `shares_problem`."""
        data = limits.world_size // (sizes.tensor * sizes.context * sizes.pipeline)
        if self.is_by_speed and self.micro_batch is not None:
            schedule = "interleaved" if sizes.chunks > 1 else self.schedule
            return shares_problem(self.batch, self.micro_batch, data, share_unit(schedule, sizes.pipeline))
        return batch_problem(self.batch, self.micro_batch, data, sizes.pipeline, sizes.chunks, self.schedule)


def _with_batch(limits: Limits, near: Sizes, pipeline: int, samples: _Samples) -> tuple[Sizes, int]:
    """The sizes like `near` that divide the batch, with a number of stages next to `pipeline`; else another batch."""
    options = [near, *(dataclasses.replace(near, pipeline=stages) for stages in divisors(limits.world_size))]
    fitting = [sizes for sizes in options if not problems(limits, sizes) and not samples.problem(limits, sizes)]
    if near in fitting:
        return near, samples.batch
    if fitting:
        return min(fitting, key=lambda sizes: (abs(sizes.pipeline - pipeline), sizes.pipeline)), samples.batch
    wrong = samples.problem(limits, near)
    return near, samples.batch if wrong is None else wrong[1]
