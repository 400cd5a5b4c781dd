"""Where samples come from: the debug sockets of this machine's processes, and metrics pages of any host."""

from __future__ import annotations

import http.client
import ipaddress
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from holmes.tools.debug.members import Member, jobs_of
from holmes.tools.debug.sources import ask_processes
from holmes_comm.errors import UsageError
from holmes_comm.process_metrics import Metrics

__all__ = ["Sample", "Source", "source_of"]

_ANSWER_S = 3.0
_PLACE = re.compile(r"(.+):(\d+)(?:-(\d+))?")
_MOST = 4096  # ports of one place: more is a slip of the pen
_MOST_BYTES = 1 << 26  # of a page
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Sample:
    """One process at one moment.

    Attributes:
        key: tells it from all others, over all samples.
        rank: in the job; -1 where it does not say.
        host: as it calls itself, or the address that was asked.
        taken_s: on this process's monotonic clock.
        metrics: None where it did not answer.
        problem: why it did not.
    """

    key: str
    rank: int
    host: str
    taken_s: float
    metrics: Metrics | None
    problem: str = ""


#: Asks everybody once. A list for each job.
Source = Callable[[], list[list[Sample]]]


def source_of(places: Sequence[str], testbed_only: bool = False) -> Source:
    """`places`: process numbers, or addresses of metrics pages (HOST:PORT, HOST:FIRST-LAST); none: this user's own.

    Raises UsageError for anything else.
    """
    if all(place.isdigit() for place in places):
        return lambda: _from_sockets([int(place) for place in places], testbed_only)
    if testbed_only:
        raise UsageError("--testbed asks processes of this machine; leave it or the addresses out")
    addresses = [address for place in places for address in _addresses(place)]
    known: dict[str, tuple[int, str]] = {}  # rank and host of those that have answered

    def ask_all() -> list[list[Sample]]:
        with ThreadPoolExecutor(min(64, len(addresses))) as pool:
            return [sorted(pool.map(lambda address: _from_page(address, known), addresses), key=lambda s: s.rank)]

    return ask_all


def _from_sockets(pids: Sequence[int], testbed_only: bool) -> list[list[Sample]]:
    answers = ask_processes(pids, testbed_only=testbed_only)
    jobs = jobs_of(answers.records, answers.silent)
    return [[_of_member(member) for member in job.members if member.silence != "unasked"] for job in jobs]


_SILENCE = {
    "stopped": "it is stopped (SIGSTOP or a debugger)",
    "busy": "it runs but does not answer",
}


def _of_member(member: Member) -> Sample:
    metrics, problem = None, ""
    if member.record is None:
        problem = _SILENCE.get(member.silence, "no answer: it has ended, or is on another machine")
    elif member.record.metrics is None:
        problem = "its Holmes is older and tells no metrics"
    else:
        metrics = member.record.metrics
    key = f"{member.host}, process {member.pid}"
    return Sample(key, member.number, member.host, time.monotonic(), metrics, problem)


def _addresses(place: str) -> list[str]:
    found = _PLACE.fullmatch(place)
    if found is None:
        raise UsageError(f"{place} is no process number and no address; an address is HOST:PORT or HOST:FIRST-LAST")
    host, first, last = found[1], int(found[2]), int(found[3] or found[2])
    if not 1 <= first <= last <= 65535 or last - first >= _MOST:
        raise UsageError(f"{place}: ports are 1 to 65535, the lower one first, at most {_MOST} of them")
    try:
        if ipaddress.ip_address(host.strip("[]")).version == 6:
            host = f"[{host.strip('[]')}]"
    except ValueError:
        pass  # a name
    return [f"{host}:{port}" for port in range(first, last + 1)]


def _whole(answer: http.client.HTTPResponse) -> bytes:
    """The page. Raises TimeoutError where it has no end: what streams there is no metrics page."""
    until_s, page = time.monotonic() + _ANSWER_S, b""
    while chunk := answer.read1(1 << 20):
        page += chunk
        if time.monotonic() > until_s or len(page) > _MOST_BYTES:
            raise TimeoutError("what answers there does not end")
    return page


def _from_page(address: str, known: dict[str, tuple[int, str]]) -> Sample:
    try:
        with _NO_PROXY.open(f"http://{address}/metrics.json", timeout=_ANSWER_S) as answer:
            metrics = Metrics.from_dict(json.loads(_whole(answer)))
        known[address] = int(metrics.labels.get("rank", -1)), metrics.labels.get("host", address)
        return Sample(address, *known[address], time.monotonic(), metrics)
    except urllib.error.URLError as error:
        problem = f"no answer: {getattr(error.reason, 'strerror', None) or error.reason}"
    except OSError as error:
        problem = f"no answer: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, AttributeError, http.client.HTTPException):
        problem = "what answers there is no metrics page of this release"
    return Sample(address, *known.get(address, (-1, address)), time.monotonic(), None, problem)
