"""What a framework can express, checked before a Plan is put into its words."""

from __future__ import annotations

from collections.abc import Sequence

from holmes.planning.plan.plan import Plan
from holmes.planning.schedule import trainer_named
from holmes.words import short
from holmes_comm.errors import UsageError


class NotExpressible(UsageError):
    """The framework has no words for a part of the plan; the message says which part and what to do instead."""


def require_trainer(plan: Plan, name: str) -> None:
    """Raises NotExpressible unless this trainer has the plan's pipeline schedule, with the forwards it begins with, and
    recomputation (one stage needs no schedule), and gives replicas equally many micro-batches as the plan does."""
    trainer = trainer_named(name)
    if plan.has_uneven_shares:
        raise NotExpressible(
            f"the plan's data_shares are {short(plan.data_shares or ())}, but {trainer.title} gives every replica "
            "equally many micro-batches; leave data_shares out, or train with holmes.DistributedOptimizer"
        )
    usual = tuple(range(plan.pipeline, 0, -1))  # what all of them run
    if plan.pipeline > 1 and plan.warmup not in (None, usual):
        raise NotExpressible(
            f"the plan's warmup is {list(plan.warmup or ())}, but {trainer.title} has no argument for it; its 1F1B "
            f"begins with {list(usual)} forwards: leave warmup out, plan again with holmes plan --for {name}, or run "
            "the plan with holmes.pipeline_schedule"
        )
    if plan.micro_batch_group not in (None, plan.pipeline) and not trainer.groups:
        raise NotExpressible(
            f"the plan's micro_batch_group is {plan.micro_batch_group}, but {trainer.title} has no argument for it; "
            "leave it out, or run the plan with Megatron or holmes.pipeline_schedule"
        )
    used = {"schedule": (plan.schedule if plan.pipeline > 1 else None, trainer.schedules)}
    used["recomputation"] = (plan.recomputation, trainer.recomputations)
    for what, (value, known) in used.items():
        if value not in (None, *known):
            raise NotExpressible(
                f"the plan's {what} is {value!r}, but {trainer.title} has {_listed(known)}; "
                f"plan again with one of these: holmes plan --for {name}"
            )


def require_one(plan: Plan, framework: str, field: str, what: str) -> None:
    """Raises NotExpressible unless this size of the plan is 1."""
    size = getattr(plan, field)
    if size != 1:
        raise NotExpressible(f"the plan has {field}={size}, but {framework} {what}; plan again with {field}=1")


def require_order(plan: Plan, framework: str) -> None:
    """Raises NotExpressible unless ranks are numbered in the plan's order, for a framework that assumes so."""
    wrong = next((i for i, rank in enumerate(plan.order) if rank != i), None)
    if wrong is not None:
        raise NotExpressible(
            f"{framework} gives position {wrong} of its grid to rank {wrong}, but the plan wants rank "
            f"{plan.order[wrong]} there; start ranks in the plan's order (start_in_plan_order before "
            "init_process_group) and use renumbered(plan)"
        )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(repr(name) for name in names) if len(names) < 3 else ", ".join(repr(name) for name in names)
