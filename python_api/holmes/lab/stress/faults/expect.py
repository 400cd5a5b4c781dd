"""What the ranks of an episode have to report, and whether a report is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holmes.lab.stress.faults.messages import GroupReport

#: Errors that a lost or silent peer may have: it ended, it cannot be reached, it was waited for in vain.
LOST = frozenset({"PeerLostError", "TimeoutError", "UnreachableError"})


@dataclass(frozen=True)
class Expectation:
    """One fault's. `must_fail`: True: every survivor reports it; False: nobody fails; None: either.

    causes: classes of the error that name it rightly. is_named: whether an error that rank `reporter` saw and that
    names rank `culprit` names it. nic: interface that must be named, empty: none. says: words that the message must
    have. at_setup: the groups cannot be made.
    warns: (reporter's node, interface) of the warnings that must appear: a rail was lost.
    """

    must_fail: bool | None
    causes: frozenset[str] = LOST
    is_named: Callable[[int, int], bool] = lambda reporter, culprit: False
    nics: frozenset[str] = frozenset()
    says: str = ""
    at_setup: bool = False
    warns: tuple[tuple[str, str], ...] = ()

    def accepts(self, report: GroupReport) -> bool:
        """Whether this error names the fault rightly."""
        if report.cause not in self.causes or report.culprit is None or self.says not in report.message:
            return False
        return self.is_named(report.reporter, report.culprit) and (not self.nics or report.nic in self.nics)


SURVIVED = Expectation(must_fail=False)


def about(ranks: frozenset[int], causes: frozenset[str] = LOST, *, at_setup: bool = False) -> Expectation:
    """Every survivor must name one of these ranks."""
    return Expectation(True, causes, lambda reporter, culprit: culprit in ranks, at_setup=at_setup)
