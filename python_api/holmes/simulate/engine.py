"""Event engine: computations that are serial on their device, transfers that share links max-min fairly. Exact times.

There are no time steps: the clock jumps to the next end of a computation, latency or transfer. Equal input gives equal
output, bit for bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from holmes.simulate.fair_share import fair_rates

Key = Hashable


@dataclass
class Task:
    """One computation (on `device`) or transfer (of `size_bytes` over `usage`), and, after `run`, when it was done.

    `cause` is the task whose end let this one start: a dependency, or what occupied its device or channel before.
    """

    key: Key
    kind: str
    after: tuple[Key, ...]
    device: str | None = None
    duration_s: float = 0.0
    size_bytes: float = 0.0
    usage: Mapping[str, float] = field(default_factory=dict)
    latency_s: float = 0.0
    channel: Key | None = None
    label: str = ""
    start_s: float = -1.0
    end_s: float = -1.0
    cause: Key | None = None


class Engine:
    """Collects tasks, then runs them once. Not thread-safe."""

    def __init__(self, links: Mapping[str, float]) -> None:
        """`links`: name to capacity in bytes per second."""
        for name, capacity in links.items():
            if not capacity > 0:
                raise ValueError(f"link {name!r} has {capacity} bytes per second; it must be above 0")
        self.links = dict(links)
        self.tasks: dict[Key, Task] = {}
        self.link_busy_s = dict.fromkeys(links, 0.0)
        self.link_bytes = dict.fromkeys(links, 0.0)

    def compute(
        self, key: Key, kind: str, device: str, duration_s: float, after: Iterable[Key], label: str = ""
    ) -> None:
        """Adds a computation. A device runs its computations in the order in which they were added."""
        self._add(Task(key, kind, tuple(after), device=device, duration_s=duration_s, label=label))

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
    ) -> None:
        """Adds a transfer. `usage`: link to how many copies of these bytes cross it at once (ranks that share a NIC).

        Transfers of one channel go one after the other, in the order in which they become ready. Without any link only
        the latency counts.
        """
        for link in usage:
            if link not in self.links:
                raise ValueError(f"transfer {key} uses link {link!r}, but there are only {', '.join(self.links)}")
        self._add(Task(key, kind, tuple(after), None, 0.0, size_bytes, dict(usage), latency_s, channel, label))

    def run(self) -> dict[Key, Task]:
        """Runs everything; returns the tasks with their times. Raises ValueError naming tasks that wait in a circle."""
        _Run(self).run()
        return self.tasks

    def _add(self, task: Task) -> None:
        if task.key in self.tasks:
            raise ValueError(f"task {task.key} was added twice")
        if not (task.duration_s >= 0 and task.size_bytes >= 0 and task.latency_s >= 0):
            raise ValueError(f"task {task.key} has a negative duration, size or latency")
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
                    raise ValueError(f"task {key} waits for {other}, which was never added")
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
                if task.device is None and task.size_bytes > 0 and task.usage:
                    self.remaining[key] = task.size_bytes
                    started = True
                else:
                    self._finish(key)
            if ended or started:
                self._share()
        if self.done < len(self.tasks):
            stuck = [str(key) for key, task in self.tasks.items() if task.end_s < 0][:6]
            raise ValueError(f"{len(self.tasks) - self.done} tasks wait for each other and never start: {stuck} ...")

    def _advance(self, next_s: float) -> None:
        elapsed_s = next_s - self.now_s
        for link in {link for key in self.remaining for link in self.tasks[key].usage}:
            self.engine.link_busy_s[link] += elapsed_s
        for key, rate in self.rates.items():
            self.remaining[key] -= rate * elapsed_s
        self.now_s = next_s

    def _share(self) -> None:
        """New rates; the end of a transfer whose rate stays the same is not computed again, so it stays exact."""
        rates = fair_rates({key: self.tasks[key].usage for key in self.remaining}, self.engine.links)
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
