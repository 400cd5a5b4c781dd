"""Plan: the decision, frozen and in a file: sizes, groups with their NICs, layers per stage; and its proof."""

from holmes.planning.plan.plan import Plan, plan_for

__all__ = ["Plan", "plan_for"]
