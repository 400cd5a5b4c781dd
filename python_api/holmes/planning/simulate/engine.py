"""Event engine: computations that are serial on their device, transfers that share links max-min fairly. Exact times.

There are no time steps: the clock jumps to the next end of a computation, latency or transfer. Equal input gives equal
output, bit for bit. Where devices share processor cores, a computation is a flow too: seconds of work at a rate of at
most 1, which takes cores; transfers may take some of them as well.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Mapping
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
    rate where it shares equally with a computation at rate 1. `cause` is the task whose end let this one start: a
    dependency, or what occupied its device or channel before.
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
        self._add(Task(key, kind, tuple(after), device, alone_s, work_s, 0.0, usage, 0.0, 1.0, None, label))

    def transfer(
        self,
        key: Key,
        kind: str,
        size_bytes: float,
        usage: Mapping[str, float],
        after: Iterable[Key],
        *,
        latency_s: float = 0.0,
        channel: Key | None = None,
        label: str = "",
        core_s_per_byte: float = 0.0,
    ) -> None:
        """Adds a transfer. `usage`: link to how many copies of these bytes cross it at once (ranks that share a NIC),
        and shared processor to the core-seconds that each byte costs on it, of which `core_s_per_byte` are one rank's:
        a rank gets as much of a core for a transfer as for a computation.

        Transfers of one channel go one after the other, in the order in which they become ready. Without any link only
        the latency counts.
        """
        self._check_usage(key, usage, self._known)
        weight = 1 / core_s_per_byte if core_s_per_byte > 0 else 1.0
        task = Task(key, kind, tuple(after), None, 0.0, 0.0, size_bytes, usage, latency_s, weight, channel, label)
        self._add(task)

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
        if not (task.duration_s >= 0 and task.work_s >= 0 and task.size_bytes >= 0 and task.latency_s >= 0):
            raise UsageError(f"task {task.key} has a negative duration, size or latency")
        self.tasks[task.key] = task


@dataclass(slots=True)
class _Flow:
    """A transfer, or a computation on shared cores, under way. `shape`: number of its `_Shape`."""

    remaining: float
    shape: int
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
        self.flows: dict[int, _Flow] = {}
        self.first_flow_end_s = math.inf
        self.busy_links: list[str] = []
        self.shapes: dict[_Shape, int] = {}
        self.shared: dict[tuple[int, ...], tuple[tuple[float, ...], list[str]]] = {}

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
            for number in ended:
                del flows[number]
                self._finish(number)
            started = False
            while timers and timers[0][0] <= next_s:
                number = heapq.heappop(timers)[1]
                task = self.tasks[number]
                if task.usage and (size := task.size_bytes + task.work_s) > 0:
                    flows[number] = _Flow(size, self._shape(task))
                    started = True
                else:
                    self._finish(number)
            if ended or started:
                self._share()
        if self.done < len(self.tasks):
            stuck = [str(task.key) for task in self.tasks if task.end_s < 0][:6]
            raise UsageError(f"{len(self.tasks) - self.done} tasks wait for each other and never start: {stuck} ...")

    def _advance(self, next_s: float) -> None:
        elapsed_s = next_s - self.now_s
        for link in self.busy_links:
            self.engine.link_busy_s[link] += elapsed_s
        for flow in self.flows.values():
            flow.remaining -= flow.rate * elapsed_s
        self.now_s = next_s

    def _shape(self, task: Task) -> int:
        weight = task.weight if self.engine.cores else 1.0
        shape = (tuple(task.usage.items()), weight, task.device is not None)
        return self.shapes.setdefault(shape, len(self.shapes))

    def _share(self) -> None:
        """New rates; the end of a transfer whose rate stays the same is not computed again, so it stays exact."""
        shapes = tuple([flow.shape for flow in self.flows.values()])
        if shapes not in self.shared:  # a pipeline repeats itself: few mixes of flows come again and again
            self.shared[shapes] = self._fair_share()
        rates, self.busy_links = self.shared[shapes]
        now_s, first_end_s = self.now_s, math.inf
        for flow, rate in zip(self.flows.values(), rates, strict=True):
            if flow.rate != rate:
                flow.rate, flow.end_s = rate, now_s + max(flow.remaining, 0.0) / rate
            if flow.end_s < first_end_s:
                first_end_s = flow.end_s
        self.first_flow_end_s = first_end_s

    def _fair_share(self) -> tuple[tuple[float, ...], list[str]]:
        """Rates of the flows, in their order, and the links that they use."""
        links, shapes = self.engine.links, list(self.shapes)
        flows = tuple(shapes[flow.shape] for flow in self.flows.values())
        capacities = list(links.items())
        for name in self.engine.cores:
            ranks = sum(dict(usage).get(name, 0.0) for usage, _, is_computing in flows if is_computing)
            capacities.append((name, self.engine.cores_of(name, ranks)))
        used = {link for usage, _, _ in flows for link, _ in usage}
        return _rates_of(flows, tuple(capacities)), [link for link in links if link in used]

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
        if task.channel is not None:
            if queue := self.queues.get(task.channel):
                self._begin(heapq.heappop(queue)[1], task.key)
            else:
                self.busy_channels.discard(task.channel)


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
