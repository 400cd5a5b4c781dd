"""What a framework can express, checked before a Plan is put into its words."""

from __future__ import annotations

from collections.abc import Sequence

from holmes.planning.plan.plan import Plan
from holmes_comm.errors import UsageError


class NotExpressible(UsageError):
    """The framework has no words for a part of the plan; the message says which part and what to do instead."""


def require_schedule(plan: Plan, framework: str, schedules: Sequence[str]) -> None:
    """Raises NotExpressible unless the plan's pipeline schedule is one of these; one stage needs no schedule."""
    if plan.pipeline > 1 and plan.schedule not in schedules:
        raise NotExpressible(
            f"the plan's schedule is {plan.schedule!r}, but {framework} has {_listed(schedules)}; "
            f"plan again with one of these"
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
