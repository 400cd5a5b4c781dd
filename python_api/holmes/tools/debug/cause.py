"""What the merged records say: one finding for each culprit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Cause"]


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong.

    Attributes:
        kind: "absent" (a rank has not come to an operation), "link" (what was sent does not arrive), "deadlock" (ranks
            wait for each other), "mismatch" (ranks called different operations), "lost" (a process is gone),
            "failure" (another error).
        sentence: who waits for whom, in which operation, on which NIC.
        culprits: ranks of the job to look at; of a link both ends, of a deadlock all.
        operation: "all_reduce #118"; empty where it is about none.
        group: the communicator's name.
        nics: NICs between culprit and waiting ranks.
        waiting: ranks of the job that wait.
        is_cause: False: it only follows from another finding.
    """

    kind: str
    sentence: str
    culprits: tuple[int, ...]
    operation: str = ""
    group: str = ""
    nics: tuple[str, ...] = ()
    waiting: tuple[int, ...] = ()
    is_cause: bool = True

    def to_dict(self) -> dict[str, Any]:
        """As plain dicts and lists."""
        return asdict(self)
