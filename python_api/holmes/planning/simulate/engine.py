"""Event engine: computations that are serial on their device, transfers that share links max-min fairly. Exact times.

There are no time steps: the clock jumps to the next end of a computation, latency or transfer. Equal input gives equal
output, bit for bit. Where devices share processor cores, a computation is a flow too: seconds of work at a rate of at
most 1, which takes cores; transfers may take some of them as well.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

from holmes_comm.errors import UsageError

Key = Hashable


@dataclass(slots=True)
class Task:
    """One computation (on `device`) or transfer (of `size_bytes` over `usage`), and, after `run`, when it was done.

    A computation with `usage` shares these cores: its `work_s` is what it takes with nobody beside it. `weight`: its
    rate where it shares equally with a computation at rate 1. `travel_s`: of a transfer, from its last byte's departure
    to its arrival; the next one of its channel leaves meanwhile. `cause` is the task whose end (or departure) let this
    one start: a dependency, or what occupied its device or channel before.
    """

    key: Key
    kind: str
    after: tuple[Key, ...]
    device: str | None = None
    duration_s: float = 0.0
    work_s: float = 0.0
    size_bytes: float = 0.0
    usage: Mapping[str, float] = field(default_factory=dict)
    latency_s: float = 0.0
    travel_s: float = 0.0
    weight: float = 1.0
    channel: Key | None = None
    label: str = ""
    start_s: float = -1.0
    end_s: float = -1.0
    cause: Key | None = None


class Engine:
    """Collects tasks, then runs them once. Not thread-safe."""

    def __init__(self, links: Mapping[str, float], cores: Mapping[str, Mapping[int, float]] | None = None) -> None:
        """`links`: name to capacity in bytes per second. `cores`: name of a processor that ranks share to the cores
        that so many ranks get together when they compute at once; between two numbers, in proportion.
        """
        for name, capacity in links.items():
            if not capacity > 0:
                raise UsageError(f"link {name!r} has {capacity} bytes per second; it must be above 0")
        for name, table in (cores or {}).items():
            if not table or min(table) < 1 or not min(table.values()) > 0:
                raise UsageError(f"cores of {name!r} are {dict(table)}; they must be above 0, for 1 rank or more")
        self.links = dict(links)
        self.cores = {name: dict(sorted(table.items())) for name, table in (cores or {}).items()}
        self.tasks: dict[Key, Task] = {}
        self._known: dict[str, object] = {**self.links, **self.cores}
        self.link_busy_s = dict.fromkeys(links, 0.0)
        self.link_bytes = dict.fromkeys(links, 0.0)

    def compute(
        self,
        key: Key,
        kind: str,
        device: str,
        duration_s: float,
        after: Iterable[Key],
        label: str = "",
        usage: Mapping[str, float] | None = None,
    ) -> None:
        """Adds a computation. A device runs its computations in the order in which they were added.

        `usage`: shared processor to the ranks that do the same on it at once; none: the device is its own.
        """
        usage = usage or {}
        self._check_usage(key, usage, self.cores)
        alone_s, work_s = (0.0, duration_s) if usage else (duration_s, 0.0)
        self._add(Task(key, kind, tuple(after), device, alone_s, work_s, usage=usage, label=label))

    def transfer(
        self,
        key: Key,
        kind: str,
        size_bytes: float,
        usage: Mapping[str, float],
        after: Iterable[Key],
        *,
        latency_s: float = 0.0,
        travel_s: float = 0.0,
        channel: Key | None = None,
        label: str = "",
        core_s_per_byte: float = 0.0,
        weight: float = 1.0,
    ) -> None:
        """Adds a transfer. `usage`: link to how many copies of these bytes cross it at once (ranks that share a NIC),
        and shared processor to the core-seconds that each byte costs on it, of which `core_s_per_byte` are one rank's:
        a rank gets as much of a core for a transfer as for a computation. `weight`: its rate beside a transfer of 1 on
        the same links.

        Transfers of one channel go one after the other, in the order in which they become ready: a transfer holds its
        channel for `latency_s` and its bytes, and has arrived `travel_s` later. Without any link only these two count.
        """
        self._check_usage(key, usage, self._known)
        if self.cores and core_s_per_byte > 0:
            weight /= core_s_per_byte
        after, size = tuple(after), size_bytes
        self._add(Task(key, kind, after, None, 0.0, 0.0, size, usage, latency_s, travel_s, weight, channel, label))

    def run(self) -> dict[Key, Task]:
        """Runs everything; returns the tasks with their times. Raises ValueError naming tasks that wait in a circle."""
        _Run(self).run()
        return self.tasks

    def cores_of(self, name: str, ranks: float) -> float:
        """Cores that so many ranks get together when they compute at once."""
        table = list(self.cores[name].items())
        for (low, at_low), (high, at_high) in pairwise(table):
            if low <= ranks <= high:
                return at_low + (at_high - at_low) * (ranks - low) / (high - low)
        return table[0][1] if ranks < table[0][0] else table[-1][1]

    @staticmethod
    def _check_usage(key: Key, usage: Mapping[str, float], known: Mapping[str, object]) -> None:
        for name, count in usage.items():
            if name not in known:
                raise UsageError(f"task {key} uses link {name!r}, but there are only {', '.join(known)}")
            if not count > 0:
                raise UsageError(f"task {key} uses {count} of {name!r}; it must be above 0")

    def _add(self, task: Task) -> None:
        if task.key in self.tasks:
            raise UsageError(f"task {task.key} was added twice")
        if not min(task.duration_s, task.work_s, task.size_bytes, task.latency_s, task.travel_s) >= 0:
            raise UsageError(f"task {task.key} has a negative duration, size or latency")
        self.tasks[task.key] = task


@dataclass(slots=True)
class _Flow:
    """A transfer, or a computation on shared cores, under way. `shape`: equal ones are one object."""

    remaining: float
    shape: _Shape
    serial: int  # in the order in which they began
    rate: float = -1.0
    end_s: float = math.inf


_Shape = tuple[tuple[tuple[str, float], ...], float, bool]  # what a flow uses, its weight, whether it computes


class _Run:
    """The state of a run. Tasks go by number here, in the order in which they were added."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tasks = list(engine.tasks.values())
        self.now_s = 0.0
        self.done = 0
        self.waiting: list[int] = []  # for so many others, each of which follows another task
        self.followers: list[list[int]] = [[] for _ in self.tasks]
        numbers = {key: number for number, key in enumerate(engine.tasks)}
        last_on_device: dict[str, Key] = {}
        for number, task in enumerate(self.tasks):
            after = dict.fromkeys(task.after)
            if task.device is not None:
                if task.device in last_on_device:
                    after[last_on_device[task.device]] = None
                last_on_device[task.device] = task.key
            for other in after:
                if other not in numbers:
                    raise UsageError(f"task {task.key} waits for {other}, which was never added")
                self.followers[numbers[other]].append(number)
            self.waiting.append(len(after))
        self.queues: dict[Key, list[tuple[float, int]]] = {}
        self.busy_channels: set[Key] = set()
        self.timers: list[tuple[float, int]] = []
        self.travelling: set[int] = set()  # transfers whose last byte has left
        self.flows: dict[int, _Flow] = {}
        self.first_flow_end_s = math.inf
        self.began = 0
        self.on_link: dict[str, dict[int, None]] = {}  # the flows on each link that has some
        self.shapes: dict[_Shape, _Shape] = {}

    def run(self) -> None:
        for number, count in enumerate(self.waiting):
            if count == 0:
                self._ready(number, None)
        timers, flows = self.timers, self.flows
        while timers or flows:
            next_s = self.first_flow_end_s
            if timers and timers[0][0] < next_s:
                next_s = timers[0][0]
            self._advance(next_s)
            ended: list[int] = []
            if self.first_flow_end_s <= next_s:
                ended = sorted(number for number, flow in flows.items() if flow.end_s <= next_s)
            changed: dict[str, None] = {}
            for number in ended:
                del flows[number]
                for link in self.tasks[number].usage:
                    del self.on_link[link][number]
                    if not self.on_link[link]:
                        del self.on_link[link]
                    changed[link] = None
                self._sent(number)
            while timers and timers[0][0] <= next_s:
                number = heapq.heappop(timers)[1]
                task = self.tasks[number]
                if number in self.travelling:
                    self._finish(number)
                elif task.usage and (size := task.size_bytes + task.work_s) > 0:
                    flows[number] = _Flow(size, self._shape(task), self.began)
                    self.began += 1
                    for link in task.usage:
                        self.on_link.setdefault(link, {})[number] = None
                        changed[link] = None
                else:
                    self._sent(number)
            if changed:
                self._share(changed)
        if self.done < len(self.tasks):
            stuck = [str(task.key) for task in self.tasks if task.end_s < 0][:6]
            raise UsageError(f"{len(self.tasks) - self.done} tasks wait for each other and never start: {stuck} ...")

    def _advance(self, next_s: float) -> None:
        elapsed_s = next_s - self.now_s
        busy_s = self.engine.link_busy_s
        for link in self.on_link:
            if link in busy_s:
                busy_s[link] += elapsed_s
        for flow in self.flows.values():
            flow.remaining -= flow.rate * elapsed_s
        self.now_s = next_s

    def _shape(self, task: Task) -> _Shape:
        shape = (tuple(task.usage.items()), task.weight, task.device is not None)
        return self.shapes.setdefault(shape, shape)

    def _share(self, changed: Iterable[str]) -> None:
        """New rates for the flows that share links, directly or by way of others, with what has come or gone on the
        links `changed`: of a hundred stages' transfers few do. The end of a transfer whose rate stays the same is not
        computed again, so it stays exact."""
        seen: set[int] = set()
        for link in changed:
            numbers = self._joined(link, seen)
            if not numbers:
                continue
            part = tuple([self.flows[number].shape for number in numbers])
            names = dict.fromkeys(link for usage, _, _ in part for link, _ in usage)
            capacities = tuple([(name, self._capacity(name, part)) for name in names])
            for number, rate in zip(numbers, _rates_of(part, capacities), strict=True):
                flow = self.flows[number]
                if flow.rate != rate:
                    flow.rate, flow.end_s = rate, self.now_s + max(flow.remaining, 0.0) / rate
        self.first_flow_end_s = min([flow.end_s for flow in self.flows.values()], default=math.inf)

    def _joined(self, link: str, seen: set[int]) -> list[int]:
        """The flows on this link and those that share links with them, and so on, in the order in which they began;
        without those `seen`, which grows by them."""
        found: list[int] = []
        links = [link]
        while links:
            for number in self.on_link.get(links.pop(), ()):
                if number not in seen:
                    seen.add(number)
                    found.append(number)
                    links += self.tasks[number].usage
        return sorted(found, key=lambda number: self.flows[number].serial)

    def _capacity(self, name: str, flows: Sequence[_Shape]) -> float:
        """Of a link, or of cores, where `flows` are all that use them."""
        if name not in self.engine.cores:
            return self.engine.links[name]
        ranks = sum(dict(usage).get(name, 0.0) for usage, _, is_computing in flows if is_computing)
        return self.engine.cores_of(name, ranks)

    def _ready(self, number: int, cause: Key | None) -> None:
        channel = self.tasks[number].channel
        if channel is None:
            self._begin(number, cause)
        elif channel in self.busy_channels:
            heapq.heappush(self.queues.setdefault(channel, []), (self.now_s, number))
        else:
            self.busy_channels.add(channel)
            self._begin(number, cause)

    def _begin(self, number: int, cause: Key | None) -> None:
        task = self.tasks[number]
        task.start_s, task.cause = self.now_s, cause
        heapq.heappush(self.timers, (self.now_s + task.duration_s + task.latency_s, number))

    def _sent(self, number: int) -> None:
        task = self.tasks[number]
        if task.travel_s > 0:
            self.travelling.add(number)
            heapq.heappush(self.timers, (self.now_s + task.travel_s, number))
        else:
            self._finish(number)
        if task.channel is not None:
            if queue := self.queues.get(task.channel):
                self._begin(heapq.heappop(queue)[1], task.key)
            else:
                self.busy_channels.discard(task.channel)

    def _finish(self, number: int) -> None:
        task, waiting, link_bytes = self.tasks[number], self.waiting, self.engine.link_bytes
        task.end_s = self.now_s
        self.done += 1
        for link, copies in task.usage.items():
            if link in link_bytes:
                link_bytes[link] += copies * task.size_bytes
        for follower in self.followers[number]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                self._ready(follower, task.key)


@lru_cache(maxsize=16384)  # choices that a search simulates differ in times and sizes more than in their flows
def _rates_of(flows: tuple[_Shape, ...], capacities: tuple[tuple[str, float], ...]) -> tuple[float, ...]:
    """Of flows of these shapes, in their order. Computations have a rate of at most 1."""
    usage = {i: dict(flow[0]) for i, flow in enumerate(flows)}
    weights = {i: weight for i, (_, weight, _) in enumerate(flows)}
    limits = {i: 1.0 for i, (_, _, is_computing) in enumerate(flows) if is_computing}
    rates = fair_rates(usage, dict(capacities), weights, limits)
    return tuple(rates[i] for i in usage)


Flow = TypeVar("Flow", bound=Hashable)


def fair_rates(
    usage: Mapping[Flow, Mapping[str, float]],
    links: Mapping[str, float],
    weights: Mapping[Flow, float] | None = None,
    limits: Mapping[Flow, float] | None = None,
) -> dict[Flow, float]:
    """Rate of each flow. `usage[flow][link]`: what one unit of rate takes of a link (copies of a transfer that cross
    it); `links`: capacities; `limits`: the most a flow can have, where there is such a number.

    The most contended link is filled first, its flows are fixed, and so on with what is left: no flow can get more
    without taking from one that has less for its weight (1 where none is given).
    """
    weights, limits = weights or {}, limits or {}
    rates: dict[Flow, float] = {}
    left = {link: links[link] for flow in usage.values() for link in flow}
    open_flows = dict(usage)
    share = 0.0
    while open_flows:
        taken = dict.fromkeys(left, 0.0)
        for key, flow in open_flows.items():
            for link, count in flow.items():
                taken[link] += count * weights.get(key, 1.0)
        fills = ((left[link] / count, link) for link, count in taken.items() if count > 0)
        fill, tightest = min(fills, default=(math.inf, ""))
        least = min((limits[key] / weights.get(key, 1.0) for key in open_flows if key in limits), default=math.inf)
        share = max(share, min(fill, least))  # later links are never tighter: only rounding could say so
        for key in list(open_flows):
            weight = weights.get(key, 1.0)
            if least < fill:
                fixed = key in limits and limits[key] / weight <= share
            else:
                fixed = open_flows[key].get(tightest, 0.0) > 0
            if fixed:
                rates[key] = weight * share
                for link, count in open_flows.pop(key).items():
                    left[link] = max(left[link] - count * rates[key], 0.0)
    return rates
