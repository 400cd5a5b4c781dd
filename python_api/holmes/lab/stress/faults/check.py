"""Whether an episode went as it must: who reported what, when, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holmes.lab.stress.faults.catalogue import Injection
from holmes.lab.stress.faults.messages import GroupReport


@dataclass(frozen=True)
class Episode:
    """What happened in one episode. `reports`: of the ranks that ended it in time; times of time.monotonic.

    `injected_s`: when the faults were in force, in order. `limit_s`: how long after the first one a rank may take to
    report it. `survivors`: ranks that have to report. `warnings`: what else they printed, by node.
    """

    number: int
    injections: Sequence[Injection]
    injected_s: float
    limit_s: float
    survivors: frozenset[int]
    reports: Mapping[int, Sequence[GroupReport]]
    warnings: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class EpisodeResult:
    """`problems`: empty where all was as it must be; `outcome`: "survived" or "reported".

    `report_s`: seconds from the fault to each survivor's report; `errors`: how often each class was reported.
    """

    problems: tuple[str, ...]
    outcome: str
    report_s: Mapping[int, float]
    errors: Mapping[str, int]


def check_episode(episode: Episode) -> EpisodeResult:
    """Looks at every report of every survivor."""
    expectations = [injection.expect for injection in episode.injections]
    must_fail = any(expect.must_fail for expect in expectations)
    may_fail = must_fail or any(expect.must_fail is None for expect in expectations)
    problems: list[str] = []
    report_s: dict[int, float] = {}
    errors: dict[str, int] = {}
    for rank in sorted(episode.survivors):
        if rank not in episode.reports:
            problems.append(f"rank {rank} reported nothing: it hangs or has ended")
            continue
        failed = [report for report in episode.reports[rank] if report.error]
        for report in failed:
            errors[report.error] = errors.get(report.error, 0) + 1
            problem = _problem_of(rank, report, episode, may_fail)
            if problem:
                problems.append(problem)
        if must_fail and len(failed) < len(episode.reports[rank]):
            problems.append(f"rank {rank} did not report it in all of its groups")
        if failed:
            report_s[rank] = max(report.reported_s for report in failed) - episode.injected_s
            if report_s[rank] > episode.limit_s:
                problems.append(f"rank {rank} reported after {report_s[rank]:.2f} s, later than {episode.limit_s:g} s")
    has_failed = bool(errors)
    if has_failed and len(report_s) < len([rank for rank in episode.survivors if rank in episode.reports]):
        silent = sorted(set(episode.survivors) & set(episode.reports) - set(report_s))
        if not must_fail:
            problems.append(f"some ranks failed, but ranks {silent} did not")
    if not has_failed and not problems:
        problems += _missing_warnings(episode)
    return EpisodeResult(tuple(problems), "reported" if has_failed else "survived", report_s, errors)


def _problem_of(rank: int, report: GroupReport, episode: Episode, may_fail: bool) -> str:
    said = f"rank {rank}, {report.kind} group, round {report.round}: {report.error}: {report.message}"
    if report.error in ("WrongResult", "Hang"):
        return f"{report.error}: {said}"
    if not may_fail:
        return f"failed though it must survive: {said}"
    if any(injection.expect.accepts(report) for injection in episode.injections):
        return ""
    return f"names it wrongly (cause {report.cause}, rank {report.culprit}, NIC {report.nic or 'none'}): {said}"


def _missing_warnings(episode: Episode) -> list[str]:
    missing = []
    for injection in episode.injections:
        for node, nic in injection.expect.warns:
            wanted = f"over NIC {nic}"
            if not any("lost the connection" in line and wanted in line for line in episode.warnings.get(node, ())):
                missing.append(f"no warning on {node} that rail {nic} is lost")
    return missing
