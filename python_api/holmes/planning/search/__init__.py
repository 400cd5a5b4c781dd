"""Search: sizes, cluster order, partition and schedule for a model on machines. Runs on a laptop: no torch, no GPU.

Flow: topology -> `Machines` -> all `Choice`s -> closed-form estimate of each -> exact partition and simulation of the
best -> `SearchResult`, its plan and the reasons.
"""

from holmes.planning.search.candidate import Candidate
from holmes.planning.search.machines import Assumptions, Machines, machines_of
from holmes.planning.search.search import SearchResult, search
from holmes.planning.search.space import Choice, Wanted

__all__ = [
    "Assumptions",
    "Candidate",
    "Choice",
    "Machines",
    "SearchResult",
    "Wanted",
    "machines_of",
    "search",
]
