"""The diagnosis for the terminal."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from holmes.tools.doctor.diagnose import Diagnosis
from holmes.tools.doctor.finding import ERROR, NOTE, SEVERITIES, WARNING

_STYLE = {ERROR: "bold red", WARNING: "yellow", NOTE: "dim"}


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Prints a table of the findings, then what was looked at."""
    if diagnosis.findings:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for header in ("", "host", "NIC", "what is wrong", "what to do"):
            table.add_column(header, overflow="fold", ratio=3 if header.startswith("what") else None)
        for finding in diagnosis.findings:
            severity = Text(finding.severity, style=_STYLE[finding.severity])
            problem = Text.assemble((f"{finding.check}: ", "bold"), finding.problem)
            table.add_row(severity, Text(finding.host), Text(finding.nic), problem, Text(finding.fix))
        console.print(table)
    for cluster in diagnosis.clusters:
        console.print(cluster, markup=False, highlight=False)
    console.print(summary(diagnosis), markup=False, highlight=False, style="green" if not _serious(diagnosis) else "")


def summary(diagnosis: Diagnosis) -> str:
    """How many hosts and ranks, what was checked, and what came of it, in one or two lines."""
    counts = Counter(finding.severity for finding in diagnosis.findings)
    hosts = f"{len(diagnosis.hosts)} host{'s' if len(diagnosis.hosts) != 1 else ''}, {diagnosis.ranks} rank" + (
        "s" if diagnosis.ranks != 1 else ""
    )
    said = ", ".join(f"{counts[kind]} {kind}{'s' if counts[kind] > 1 else ''}" for kind in SEVERITIES if counts[kind])
    lines = [f"{'All good' if not _serious(diagnosis) else 'Found'}: {said or 'nothing to report'} ({hosts})."]
    lines.append(f"Checked: {', '.join(diagnosis.checked)}.")
    if diagnosis.skipped:
        lines.append(f"Not checked, for want of a second host (run it as a job): {', '.join(diagnosis.skipped)}.")
    return "\n".join(lines)


def _serious(diagnosis: Diagnosis) -> bool:
    return any(finding.severity != NOTE for finding in diagnosis.findings)
