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
from itertools import pairwise
from typing import TypeVar

from holmes_comm.errors import UsageError

Key = Hashable


@dataclass
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
        self._check_usage(key, usage or {}, self.cores)
        task = Task(key, kind, tuple(after), device=device, label=label)
        if usage:
            task.usage, task.work_s = dict(usage), duration_s
        else:
            task.duration_s = duration_s
        self._add(task)

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
        self._check_usage(key, usage, {**self.links, **self.cores})
        weight = 1 / core_s_per_byte if core_s_per_byte > 0 else 1.0
        task = Task(key, kind, tuple(after), None, 0.0, 0.0, size_bytes, dict(usage), latency_s, weight, channel, label)
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


class _Run:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tasks = engine.tasks
        self.number = {key: i for i, key in enumerate(self.tasks)}
        self.now_s = 0.0
        self.waiting = {key: len(set(task.after)) for key, task in self.tasks.items()}
        self.followers: dict[Key, list[Key]] = {key: [] for key in self.tasks}
        self.programs: dict[str, list[Key]] = {}
        for key, task in self.tasks.items():
            for other in dict.fromkeys(task.after):
                if other not in self.tasks:
                    raise UsageError(f"task {key} waits for {other}, which was never added")
                self.followers[other].append(key)
            if task.device is not None:
                self.programs.setdefault(task.device, []).append(key)
        self.next_in_program = dict.fromkeys(self.programs, 0)
        self.queues: dict[Key, list[tuple[float, int, Key]]] = {}
        self.channel_busy: dict[Key, bool] = {}
        self.timers: list[tuple[float, int, Key]] = []
        self.remaining: dict[Key, float] = {}
        self.rates: dict[Key, float] = {}
        self.flow_ends: dict[Key, float] = {}
        self.done = 0

    def run(self) -> None:
        for key, count in self.waiting.items():
            if count == 0:
                self._ready(key, None)
        while self.timers or self.flow_ends:
            next_s = min(
                self.timers[0][0] if self.timers else float("inf"), min(self.flow_ends.values(), default=float("inf"))
            )
            self._advance(next_s)
            ended = sorted((key for key, end in self.flow_ends.items() if end <= next_s), key=self.number.__getitem__)
            for key in ended:
                del self.remaining[key], self.rates[key], self.flow_ends[key]
                self._finish(key)
            started = False
            while self.timers and self.timers[0][0] <= next_s:
                key = heapq.heappop(self.timers)[2]
                task = self.tasks[key]
                if task.usage and task.size_bytes + task.work_s > 0:
                    self.remaining[key] = task.size_bytes + task.work_s
                    started = True
                else:
                    self._finish(key)
            if ended or started:
                self._share()
        if self.done < len(self.tasks):
            stuck = [str(key) for key, task in self.tasks.items() if task.end_s < 0][:6]
            raise UsageError(f"{len(self.tasks) - self.done} tasks wait for each other and never start: {stuck} ...")

    def _advance(self, next_s: float) -> None:
        elapsed_s = next_s - self.now_s
        for link in {link for key in self.remaining for link in self.tasks[key].usage}:
            if link in self.engine.links:
                self.engine.link_busy_s[link] += elapsed_s
        for key, rate in self.rates.items():
            self.remaining[key] -= rate * elapsed_s
        self.now_s = next_s

    def _share(self) -> None:
        """New rates; the end of a transfer whose rate stays the same is not computed again, so it stays exact."""
        usage = {key: self.tasks[key].usage for key in self.remaining}
        if self.engine.cores:
            computing = [key for key in usage if self.tasks[key].device is not None]
            capacities = dict(self.engine.links)
            for name in self.engine.cores:
                capacities[name] = self.engine.cores_of(name, sum(usage[key].get(name, 0.0) for key in computing))
            weights = {key: self.tasks[key].weight for key in usage}
            rates = fair_rates(usage, capacities, weights, dict.fromkeys(computing, 1.0))
        else:
            rates = fair_rates(usage, self.engine.links)
        for key, rate in rates.items():
            if self.rates.get(key) != rate:
                self.flow_ends[key] = self.now_s + max(self.remaining[key], 0.0) / rate
        self.rates = rates

    def _ready(self, key: Key, cause: Key | None) -> None:
        task = self.tasks[key]
        task.cause = cause
        if task.device is not None:
            self._start_device(task.device, cause)
        elif task.channel is None:
            self._begin(key, cause)
        else:
            heapq.heappush(self.queues.setdefault(task.channel, []), (self.now_s, self.number[key], key))
            self._start_channel(task.channel, cause)

    def _start_device(self, device: str, cause: Key | None) -> None:
        program, index = self.programs[device], self.next_in_program[device]
        if index < len(program) and self.waiting[program[index]] == 0:
            previous = self.tasks[program[index - 1]] if index else None
            if previous is None or previous.end_s >= 0:
                self.next_in_program[device] = index + 1
                self._begin(program[index], cause)

    def _start_channel(self, channel: Key, cause: Key | None) -> None:
        if self.queues.get(channel) and not self.channel_busy.get(channel):
            self.channel_busy[channel] = True
            self._begin(heapq.heappop(self.queues[channel])[2], cause)

    def _begin(self, key: Key, cause: Key | None) -> None:
        task = self.tasks[key]
        task.start_s, task.cause = self.now_s, cause
        heapq.heappush(self.timers, (self.now_s + task.duration_s + task.latency_s, self.number[key], key))

    def _finish(self, key: Key) -> None:
        task = self.tasks[key]
        task.end_s = self.now_s
        self.done += 1
        for link, copies in task.usage.items():
            if link in self.engine.links:
                self.engine.link_bytes[link] += copies * task.size_bytes
        for follower in self.followers[key]:
            self.waiting[follower] -= 1
            if self.waiting[follower] == 0:
                self._ready(follower, key)
        if task.device is not None:
            self._start_device(task.device, key)
        elif task.channel is not None:
            self.channel_busy[task.channel] = False
            self._start_channel(task.channel, key)


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
