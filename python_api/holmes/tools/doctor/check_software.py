"""Software: variables that override, versions that differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from holmes.cluster.topology import RDMA_CLASSES
from holmes.tools.doctor.facts import JobFacts
from holmes.tools.doctor.finding import ERROR, NOTE, WARNING, Finding
from holmes.tools.doctor.variables import HOLMES, MUST_AGREE, NOT_READ, OTHERS, USUAL, fix_of
from holmes.words import some


def check_variables(job: JobFacts) -> Iterator[Finding]:
    """Every variable that overrides a decision, with what it does; those unknown; those unequal."""
    mixed = len({nic.nic_class for host in job.hosts for nic in host.wires} & set(RDMA_CLASSES)) > 1
    for facts in job.ranks:
        host = job.host_of(facts.rank)
        for name, value in facts.variables.items():
            shown = f"{name}={value}"
            if name in USUAL or (facts.emulated and name in ("HOLMES_SYSFS_ROOT", "GLOO_SOCKET_IFNAME")):
                continue
            if name in OTHERS:
                effect, is_mistake = OTHERS[name]
                fix = f"unset {name}" + ("" if is_mistake else ", unless it is meant")
                yield Finding(
                    WARNING if is_mistake and mixed else NOTE, "variable", host, "", f"{shown}: {effect}", fix
                )
            elif name in HOLMES:
                problem = f"{shown}: {HOLMES[name]}"
                yield Finding(NOTE, "variable", host, "", problem, "nothing, if meant (docs/environment.md)")
            elif (correction := fix_of(name)) is not None:
                yield Finding(WARNING, "variable", host, "", f"{shown}: {NOT_READ}", correction)
            elif name.startswith("NCCL_"):
                yield Finding(NOTE, "variable", host, "", f"{shown}: a setting of NCCL", "nothing, if meant")
        if facts.variables_error:
            yield Finding(ERROR, "variable", host, "", facts.variables_error, "correct it, or unset it")
        if facts.selection_error:
            yield Finding(
                ERROR,
                "nic selection",
                host,
                "",
                facts.selection_error,
                "correct HOLMES_NICS for this host, or unset it",
            )
    yield from _unequal(job)


def _unequal(job: JobFacts) -> Iterator[Finding]:
    for name in MUST_AGREE:
        places: dict[str | None, list[int]] = defaultdict(list)
        for facts in job.ranks:
            places[facts.variables.get(name)].append(facts.rank)
        if len(places) < 2:
            continue
        usual = max(places, key=lambda value: len(places[value]))
        for value, ranks in places.items():
            if value != usual:
                yield Finding(
                    ERROR,
                    "variable",
                    some(dict.fromkeys(job.host_of(rank) for rank in ranks)),
                    "",
                    f"{_set_to(name, value)} on {_ranks(ranks)}, but {_set_to(name, usual)} on the "
                    f"{len(places[usual])} others; it must be equal",
                    f"set {name} for all ranks alike, or nowhere",
                )


def _set_to(name: str, value: str | None) -> str:
    return f"{name} is unset" if value is None else f"{name}={value}"


def check_versions(job: JobFacts) -> Iterator[Finding]:
    """One version of NCCL, Holmes and torch in a job."""
    kinds = {
        "NCCL": ("nccl_version", ERROR, "they refuse each other or hang"),
        "Holmes": ("holmes_version", ERROR, "they refuse each other"),
        "torch": ("torch_version", WARNING, "results and protocols may differ"),
    }
    for what, (attribute, severity, effect) in kinds.items():
        versions = {facts.rank: getattr(facts, attribute) for facts in job.ranks}
        usual, count = Counter(versions.values()).most_common(1)[0] if versions else (None, 0)
        places: dict[tuple[str, str | None], list[int]] = defaultdict(list)
        for rank, version in versions.items():
            if version != usual:
                places[job.host_of(rank), version].append(rank)
        for (host, version), ranks in places.items():
            has = f"no {what}" if version is None else f"{what} {version}"
            yield Finding(
                severity,
                "version",
                host,
                "",
                f"{_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {has}, but {count} ranks have "
                f"{'none' if usual is None else usual}: {effect}",
                f"install one {what} everywhere (the same image or environment)",
            )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {some(map(str, ranks))}"
