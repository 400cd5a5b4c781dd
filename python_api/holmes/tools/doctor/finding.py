"""Finding: one thing that is wrong or worth knowing, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from holmes.words import some

ERROR = "error"  # the job will fail, hang, or use the wrong network
WARNING = "warning"  # it may, or it will be slower than it need be
NOTE = "note"  # worth knowing
SEVERITIES = (ERROR, WARNING, NOTE)


@dataclass(frozen=True)
class Finding:
    """What a check found. `check` is the check's name, `host` one or several names, `nic` empty where none is meant.

    `problem` names the value and the rule, `fix` a command, setting or place to look.
    """

    severity: str
    check: str
    host: str
    nic: str
    problem: str
    fix: str

    def __str__(self) -> str:
        """One line for people."""
        nic = f" NIC {self.nic}" if self.nic else ""
        return f"{self.severity}: host {self.host}{nic} ({self.check}): {self.problem}. To do: {self.fix}"


def merged(findings: Iterable[Finding], host_count: int) -> list[Finding]:
    """The findings, worst first; those that differ only in their host become one."""
    hosts: dict[Finding, list[str]] = {}
    for finding in findings:
        names = hosts.setdefault(replace(finding, host=""), [])
        if finding.host not in names:
            names.append(finding.host)
    found = []
    for finding, names in hosts.items():
        every = len(names) == host_count > 4
        found.append(replace(finding, host=f"all {host_count}" if every else some(names)))
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
