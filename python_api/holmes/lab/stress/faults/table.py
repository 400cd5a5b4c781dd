"""The table of faults: injected, survived or reported rightly, time to report; as data and as markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holmes.lab.stress.faults.catalogue import FAULTS
from holmes.lab.stress.faults.check import Episode, EpisodeResult
from holmes.lab.stress.faults.settings import FaultSettings

_SHOWN = 3  # problems of an episode
_LIVES = 8  # processes, the longest-lived ones


@dataclass
class Row:
    """One fault's, or a mixture's. `report_s`: of every survivor of every episode."""

    injected: int = 0
    right: int = 0
    survived: int = 0
    reported: int = 0
    report_s: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Counts, the errors' classes, and seconds."""
        times = {
            "median_report_s": round(statistics.median(self.report_s), 3) if self.report_s else None,
            "max_report_s": round(max(self.report_s), 3) if self.report_s else None,
        }
        counts = {name: getattr(self, name) for name in ("injected", "right", "survived", "reported")}
        return {**counts, "reports": len(self.report_s), **times, "errors": dict(sorted(self.errors.items()))}


@dataclass
class SoakResult:
    """All episodes of a run. `problems`: by episode; `uses`: what each process held after each episode;
    `is_interrupted`: Ctrl-C or SIGTERM came before its time was over."""

    settings: FaultSettings
    rows: dict[str, Row] = field(default_factory=dict)
    problems: dict[int, list[str]] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    uses: dict[str, list[Mapping[str, int]]] = field(default_factory=dict)
    driver_uses: list[Mapping[str, int]] = field(default_factory=list)
    episodes: int = 0
    operations: int = 0
    checked_bytes: int = 0
    seconds: float = 0.0
    is_interrupted: bool = False

    def add(self, episode: Episode, checked: EpisodeResult, seconds: float) -> None:
        """Counts one episode."""
        names = [injection.fault for injection in episode.injections]
        row = self.rows.setdefault("+".join(sorted(names)) if len(names) > 1 else (names or ["none"])[0], Row())
        row.injected += 1
        row.right += not checked.problems
        row.survived += checked.outcome == "survived"
        row.reported += checked.outcome == "reported"
        row.report_s += checked.report_s.values()
        for name, count in checked.errors.items():
            row.errors[name] = row.errors.get(name, 0) + count
        if checked.problems:
            self.problems[episode.number] = list(checked.problems)
        self.episodes += 1
        self.seconds += seconds
        for reports in episode.reports.values():
            self.operations += sum(report.operations for report in reports)
            self.checked_bytes += sum(report.checked_bytes for report in reports)

    @property
    def exit_code(self) -> int:
        """0 where every episode went as it must and nothing leaked."""
        return int(bool(self.problems or self.leaks or not self.episodes))

    def summary(self) -> dict[str, Any]:
        """Ready for JSON."""
        longest = sorted(self.uses.items(), key=lambda item: -len(item[1]))[:_LIVES]
        lives = {name: _span(uses) for name, uses in longest}
        return {
            "seed": self.settings.seed,
            "seconds": round(self.seconds, 1),
            "episodes": self.episodes,
            "operations_checked": self.operations,
            "checked_bytes": self.checked_bytes,
            "timeout_s": self.settings.timeout_s,
            "connect_timeout_s": self.settings.connect_timeout_s,
            "slack_s": self.settings.slack_s,
            "faults": {name: row.to_dict() for name, row in sorted(self.rows.items())},
            "left_out": self.left_out,
            "problems": {str(number): lines for number, lines in self.problems.items()},
            "leaks": self.leaks,
            "uses": {"the driver": _span(self.driver_uses), **lives},
        }

    def markdown(self) -> str:
        """The tables, alone faults first."""
        lines = [
            f"{self.episodes} episodes in {self.seconds:.0f} s, seed {self.settings.seed}; {self.operations} "
            f"operations with {self.checked_bytes / 1e6:.0f} MB of results checked. Deadline of an operation "
            f"{self.settings.timeout_s:g} s, of a set-up {self.settings.connect_timeout_s:g} s.",
            "",
            "| fault | injected | as it must be | survived | reported | errors, how often | s to report: median, max |",
            "| --- | ---: | ---: | ---: | ---: | --- | --- |",
        ]
        for name in sorted(self.rows, key=lambda name: ("+" in name, name)):
            row = self.rows[name]
            facts = row.to_dict()
            errors = ", ".join(f"{error} {count}" for error, count in facts["errors"].items()) or "-"
            times = f"{facts['median_report_s']:.2f}, {facts['max_report_s']:.2f}" if row.report_s else "-"
            text = name if "+" in name or name not in FAULTS else f"{name}: {FAULTS[name].text}"
            cells = (text, row.injected, row.right, row.survived, row.reported, errors, times)
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        lines += ["", f"Left out: {self.left_out or 'nothing'}. Leaks: {'; '.join(self.leaks) or 'none'}.", ""]
        lines += ["| process | episodes | what it held: at first, at most, at last |", "| --- | ---: | --- |"]
        for name, spans in self.summary()["uses"].items():
            held = (
                f"{what.replace('_', ' ')} {_text(what, span)}" for what, span in spans.items() if what != "episodes"
            )
            lines.append(f"| {name} | {spans.get('episodes', 0)} | {'; '.join(held)} |")
        for number, problems in self.problems.items():
            lines += [f"- episode {number}: {problem}" for problem in problems[:_SHOWN]]
        return "\n".join(lines) + "\n"


def _text(what: str, span: Mapping[str, int]) -> str:
    unit = 2**20 if what.endswith("_bytes") else 1
    text = ", ".join(f"{span[when] / unit:.0f}" for when in ("first", "max", "last"))
    return text + (" MiB" if unit > 1 else "")


def _span(uses: list[Mapping[str, int]]) -> dict[str, Any]:
    """First, largest and last of each count, and its course: at every tenth of the process's life."""
    if not uses:
        return {}
    spans: dict[str, Any] = {"episodes": len(uses)}
    for what in uses[0]:
        values = [use[what] for use in uses]
        course = [values[(len(values) - 1) * tenth // 10] for tenth in range(11)]
        spans[what] = {"first": values[0], "max": max(values), "last": values[-1], "course": course}
    return spans
