"""Stress: communication shaped like training, on planned groups and NICs, every result checked (docs/stress.md).

Flow: topology -> plan -> one communicator per group (groups) -> one loop per kind of group, all at once (loops), with
data whose results are known (patterns) -> what every rank moved and found (summary).
"""

from holmes.lab.stress.result import GroupResult, RankResult, StressResult, WrongResultError
from holmes.lab.stress.run import run_stress
from holmes.lab.stress.settings import Settings

__all__ = ["GroupResult", "RankResult", "Settings", "StressResult", "WrongResultError", "run_stress"]
