"""What a simulated step came to: times, rates, where each device was idle and why, the link that limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holmes.planning.simulate.build import COMMUNICATION, build, device_of
from holmes.planning.simulate.engine import Key, Task
from holmes.planning.simulate.step import Step


@dataclass(frozen=True)
class DeviceTime:
    """Seconds of one stage's device; busy, bubble and exposed communication add up to the step.

    `exposed_s` (by kind: p2p, gather, reduce, embedding): idle while the transfers that it waited for were under way;
    `bubble_s`: idle while it waited for another stage's computation.
    """

    busy_s: float
    bubble_s: float
    exposed_s: Mapping[str, float]


@dataclass(frozen=True)
class Result:
    """One simulated step. `critical_s`: seconds of each link's transfers (and of "compute") on the critical path."""

    step_s: float
    devices: tuple[DeviceTime, ...]
    link_busy_share: Mapping[str, float]
    link_bytes: Mapping[str, float]
    critical_s: Mapping[str, float]
    tasks: tuple[Task, ...]

    @property
    def bubble_share(self) -> float:
        """Part of the devices' time in which they wait for another stage's computation."""
        return sum(device.bubble_s for device in self.devices) / (len(self.devices) * self.step_s)

    @property
    def exposed_s(self) -> dict[str, float]:
        """Exposed communication by kind, the average over the devices."""
        return {
            kind: sum(device.exposed_s[kind] for device in self.devices) / len(self.devices) for kind in COMMUNICATION
        }

    @property
    def bottleneck_link(self) -> str | None:
        """The link whose transfers take most of the critical path; None where none is on it."""
        links = {link: time_s for link, time_s in self.critical_s.items() if link != "compute" and time_s > 0}
        return max(links, key=lambda link: (links[link], link)) if links else None

    def samples_per_s(self, global_batch: int) -> float:
        """Samples of all ranks per second."""
        return global_batch / self.step_s

    def tflops_per_gpu(self, flops_per_sample: float, global_batch: int, gpus: int) -> float:
        """1e12 floating-point operations per second of each GPU, by the model's formula."""
        return flops_per_sample * self.samples_per_s(global_batch) / gpus / 1e12

    def describe(self) -> str:
        """A few lines for people."""
        exposed = ", ".join(f"{kind} {time_s:.4g} s" for kind, time_s in self.exposed_s.items() if time_s > 0)
        link = self.bottleneck_link
        limit = "none: no transfer is on the critical path"
        if link is not None:
            limit = f"{link}, {self.critical_s[link] / self.step_s:.1%} of the critical path"
        return (
            f"step {self.step_s:.4g} s, bubble {self.bubble_share:.1%}\n"
            f"exposed communication (mean of the devices): {exposed or 'none'}\n"
            f"bottleneck link: {limit}"
        )


def simulate(step: Step) -> Result:
    """Simulates one step. Deterministic; raises ValueError where the step contradicts itself."""
    engine = build(step)
    tasks = engine.run()
    step_s = max(task.end_s for task in tasks.values())
    on_device: dict[str, list[Task]] = {device_of(i): [] for i in range(len(step.stages))}
    for task in tasks.values():
        if task.device in on_device:  # others are of pipelines that have their turn before this one
            on_device[task.device].append(task)
    return Result(
        step_s=step_s,
        devices=tuple(_device_time(tasks, mine, step_s) for mine in on_device.values()),
        link_busy_share={link: busy_s / step_s if step_s else 0.0 for link, busy_s in engine.link_busy_s.items()},
        link_bytes=dict(engine.link_bytes),
        critical_s=_critical_path(tasks, engine.links),
        tasks=tuple(tasks.values()),
    )


def _device_time(tasks: Mapping[Key, Task], mine: Sequence[Task], step_s: float) -> DeviceTime:
    busy_s, bubble_s, cursor_s = 0.0, 0.0, 0.0
    exposed_s = dict.fromkeys(COMMUNICATION, 0.0)
    for task in mine:
        for kind, time_s in _why_idle(tasks, task, cursor_s, task.start_s):
            if kind in exposed_s:
                exposed_s[kind] += time_s
            else:
                bubble_s += time_s
        busy_s += task.end_s - task.start_s
        cursor_s = task.end_s
    return DeviceTime(busy_s, bubble_s + step_s - cursor_s, exposed_s)


def _why_idle(tasks: Mapping[Key, Task], task: Task, since_s: float, until_s: float) -> list[tuple[str, float]]:
    """Cuts the idle time before a task by what was under way, back along the chain of causes."""
    pieces: list[tuple[str, float]] = []
    cause = task.cause
    while until_s > since_s:
        if cause is None:
            pieces.append(("compute", until_s - since_s))
            break
        cut = max(tasks[cause].start_s, since_s)
        pieces.append((tasks[cause].kind, until_s - cut))
        until_s, cause = cut, tasks[cause].cause
    return pieces


def _critical_path(tasks: Mapping[Key, Task], links: Mapping[str, float]) -> dict[str, float]:
    path: dict[str, float] = {"compute": 0.0}
    last = max(tasks.values(), key=lambda item: item.end_s)
    task: Task | None = last
    until_s = last.end_s  # of a transfer that the next one of its channel waited for, only until that left
    while task is not None:
        name = "compute"
        if task.device is None and task.usage:
            usage = {link: copies for link, copies in task.usage.items() if link in links}
            name = max(usage, key=lambda link: (usage[link] / links[link], link), default="compute")
        path[name] = path.get(name, 0.0) + until_s - task.start_s
        until_s = task.start_s
        task = tasks[task.cause] if task.cause is not None else None
    return path
