"""Doctor: looks a job's hosts over before it starts, and says what would slow, stop or hang it, each with its fix.

Flow: every rank's `RankFacts` (collect) -> the ranks try connections and compare clocks (trials, clock) -> rank 0 runs
the checks, functions of that plain data (check_*) -> findings. Described in docs/doctor.md.
"""

from holmes.tools.doctor.diagnose import CHECKS, Diagnosis, diagnose
from holmes.tools.doctor.examine import examine
from holmes.tools.doctor.facts import Clock, HostFacts, JobFacts, NicFacts, RankFacts, Trial, gather_hosts
from holmes.tools.doctor.finding import ERROR, NOTE, WARNING, Finding

__all__ = [
    "CHECKS",
    "ERROR",
    "NOTE",
    "WARNING",
    "Clock",
    "Diagnosis",
    "Finding",
    "HostFacts",
    "JobFacts",
    "NicFacts",
    "RankFacts",
    "Trial",
    "diagnose",
    "examine",
    "gather_hosts",
]
