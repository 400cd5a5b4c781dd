"""Gloo and Open MPI under the same faults: what every survivor reports, and when. Bounded; silence is a result."""

from __future__ import annotations

import json
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holmes.lab.testbed import Process, TestbedSession
from holmes.lab.testbed.fabric import enter_node, node_env
from holmes.lab.testbed.launch import Testbed, place_ranks, rank_environment
from holmes.tools.bench.job_network import FD_VARIABLE
from holmes.tools.bench.launch import MPI_ENVIRONMENT, mpirun

PEERS = ("holmes", "gloo", "openmpi")
PEER_FAULTS = ("kill", "stop", "nic-down", "cut-pair")
PEER_TIMEOUT_S = 5.0  # where the library has a deadline
NO_REPORT_S = 60.0
_SPEC = "four-nodes"
_VICTIM, _OTHER = 2, 1
_START_S = 60.0
_LOAD_S = 1.0
_NETWORK_FD = 9
_EXCERPT = 240  # characters of what a library said
_NOWHERE = "02:00:00:00:00:99"

Say = Callable[[str], None]


@dataclass(frozen=True)
class PeerRow:
    """One library under one fault: of `survivors` ranks, how many reported anything and how many named the victim's
    rank, host or address; seconds to the reports; what the first and the last one said.
    """

    library: str
    fault: str
    survivors: int
    reported: int
    named: int
    report_s: tuple[float, ...]
    said: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def run_peers(names: Sequence[str], say: Say) -> Iterator[PeerRow]:
    """Every library under every fault, one after the other, four ranks on four nodes. Raises TestbedError."""
    for name in names:
        for fault in PEER_FAULTS:
            row = _run(name, fault)
            times = f", the last after {max(row.report_s):.1f} s" if row.report_s else ""
            say(f"{name} under {fault}: {row.reported} of {row.survivors} reported{times}, {row.named} named it")
            yield row


def _run(name: str, fault: str) -> PeerRow:
    with Testbed(_SPEC).session() as session:
        places = place_ranks(session.spec, 1)
        worker = [sys.executable, "-m", "holmes.lab.stress.faults.peer_rank", name, str(PEER_TIMEOUT_S)]
        if name == "openmpi":
            session.exec(None, ["ip", "link", "set", "dev", "lo", "up"])
            processes = [session.spawn(None, _mpi(session, places, worker), MPI_ENVIRONMENT)]
        else:
            processes = session.launch(worker).processes
        pids = _wait_running(session, processes, len(places))
        time.sleep(_LOAD_S)
        injected_s = time.monotonic()
        survivors = _inject(session, fault, name, processes, pids)
        end_s = injected_s + NO_REPORT_S
        session.wait_until(
            lambda: survivors <= set(_reports(processes)) or all(p.returncode is not None for p in processes),
            end_s - time.monotonic(),
        )
        reports = _reports(processes)
        told = {rank: reports[rank] for rank in survivors if rank in reports}
        if name == "openmpi" and not told and processes[0].returncode is not None:
            # mpirun ended the job: its own words are what the user has.
            said = " ".join(line for line in processes[0].lines if line.strip() and not line.startswith(("{", "---")))
            ended_s = processes[0].ended_s or time.monotonic()
            told = {rank: {"at_s": ended_s, "error": "ended by mpirun", "message": said} for rank in survivors}
    victims = {_VICTIM, _OTHER} if fault == "cut-pair" else {_VICTIM}
    marks = [mark for rank in sorted(victims) for mark in _marks(session, places[rank][0], rank)]
    texts = [f"{report['error']}: {report['message']}" for report in told.values()]
    return PeerRow(
        library=name,
        fault=fault,
        survivors=len(survivors),
        reported=len(told),
        named=sum(_is_named(rank, report, victims, marks) for rank, report in told.items()),
        report_s=tuple(sorted(round(report["at_s"] - injected_s, 2) for report in told.values())),
        said=tuple(dict.fromkeys(_excerpt(text, marks) for text in texts)),
    )


def _marks(session: TestbedSession, node: str, rank: int) -> list[str]:
    return [f"rank {rank}", f"(host {node})", str(session.spec.node(node).nics[0].address.ip)]


def _is_named(rank: int, report: Mapping[str, Any], victims: set[int], marks: Sequence[str]) -> bool:
    """By the error's `peer` where it has one (a victim names whom it cannot reach), else anywhere in its text."""
    if report.get("peer") is not None:
        return rank in victims or report["peer"] in victims
    return any(mark in report["message"] for mark in marks)


def _excerpt(text: str, marks: Sequence[str]) -> str:
    """The beginning, and the words around the first mark where that lies further on."""
    text = " ".join(text.split())
    places = [text.find(mark) for mark in marks if mark in text]
    at = min(places, default=0)
    if at < _EXCERPT:
        return text[:_EXCERPT]
    return f"{text[: _EXCERPT // 2]} ... {text[at - _EXCERPT // 4 : at + _EXCERPT // 4]}"


def _mpi(session: TestbedSession, places: Sequence[tuple[str, int]], worker: Sequence[str]) -> list[str]:
    ranks = []
    for rank, (node, _) in enumerate(places):
        variables = {
            **node_env(session.spec.node(node)),
            **rank_environment(session.spec, places, rank),
            FD_VARIABLE: str(_NETWORK_FD),
            "OMP_NUM_THREADS": "1",
        }
        inside = enter_node(node, str(Path.cwd()), worker)
        script = f"exec {_NETWORK_FD}< /proc/self/ns/net; exec {shlex.join(inside)}"
        ranks.append(["env", *(f"{key}={value}" for key, value in variables.items()), "sh", "-c", script])
    return mpirun(ranks)


def _lines(processes: Sequence[Process]) -> list[dict[str, Any]]:
    found, decoder = [], json.JSONDecoder()
    for process in processes:
        for line in list(process.lines):
            at = line.find("{")
            while at >= 0:  # mpirun may join the ranks' lines
                try:
                    fields, at = decoder.raw_decode(line, at)
                except ValueError:
                    break
                found.append(fields)
                at = line.find("{", at)
    return found


def _wait_running(session: TestbedSession, processes: Sequence[Process], size: int) -> dict[int, int]:
    """Process numbers of the ranks, inside the testbed, once all of them have run an operation."""

    def running() -> dict[int, int]:
        return {line["rank"]: line["pid"] for line in _lines(processes) if line["event"] == "running"}

    ready = session.wait_until(
        lambda: len(running()) == size or any(p.returncode is not None for p in processes), _START_S
    )
    if not ready or len(running()) < size:
        said = [line for process in processes for line in process.lines[-5:]]
        raise RuntimeError(f"the ranks did not start within {_START_S:g} s; they said {said}")
    return running()


def _inject(
    session: TestbedSession, fault: str, name: str, processes: Sequence[Process], pids: dict[int, int]
) -> set[int]:
    """Breaks it; returns the ranks that have to report."""
    everybody = set(pids)
    victim, other = (session.spec.nodes[rank] for rank in (_VICTIM, _OTHER))
    if fault in ("kill", "stop"):
        number = signal.SIGKILL if fault == "kill" else signal.SIGSTOP
        if name == "openmpi":  # mpirun's child: no process of the session's own
            session.exec(None, ["kill", f"-{int(number)}", str(pids[_VICTIM])])
        else:
            processes[_VICTIM].kill(number, group=True)
        return everybody - {_VICTIM}
    if fault == "nic-down":
        session.set_link(victim.name, victim.nics[0].name, up=False)
        return everybody
    for here, there in ((victim, other), (other, victim)):
        address = str(there.nics[0].address.ip)
        command = ["ip", "neigh", "replace", address, "lladdr", _NOWHERE, "nud", "permanent", "dev", here.nics[0].name]
        session.exec(here.name, command)
    return everybody


def _reports(processes: Sequence[Process]) -> dict[int, dict[str, Any]]:
    return {line["rank"]: line for line in _lines(processes) if line["event"] == "failed"}


def peer_markdown(rows: Sequence[PeerRow]) -> str:
    """The table, and what was said below it."""
    lines = [
        f"Four ranks on four nodes, one network, all-reduces in a loop; deadline {PEER_TIMEOUT_S:g} s where the "
        f"library has one; no report within {NO_REPORT_S:g} s counts as none. A report names the fault where its "
        "error's `peer` is the victim (Holmes), or where its text holds the victim's rank, host or address at all (the "
        "others); of a cut pair, one of the two.",
        "",
        "| fault | library | survivors that report | that name it | seconds to report: median, max | says |",
        "| --- | --- | ---: | ---: | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: (PEER_FAULTS.index(row.fault), PEERS.index(row.library))):
        times = f"{statistics.median(row.report_s):.2f}, {max(row.report_s):.2f}" if row.report_s else "-"
        said = row.said[0].replace("|", "/").replace("\n", " ") if row.said else "nothing"
        reported = f"{row.reported} of {row.survivors}"
        lines.append(f"| {row.fault} | {row.library} | {reported} | {row.named} | {times} | {said} |")
    return "\n".join(lines) + "\n"
