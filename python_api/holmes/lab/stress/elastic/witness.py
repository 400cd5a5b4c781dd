"""Who watches an elastic job from outside: its steps, its folder of checkpoints, and the machine's own stalls."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LOOK_S = 0.02
_CHECKPOINT = re.compile(r"step-(\d+)-generation-(\d+)")
_CLAIM = re.compile(r"generation-(\d+)\.claim")


class _Thread:
    """Does `look` again and again until it is stopped."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            self.look()

    def look(self) -> None:
        """Once."""
        raise NotImplementedError


class StepWitness:
    """Each step's value is that of an unbroken run, and no generation trains once a later one does. Thread safe.

    When a step began counts, not when it was told: a rank may be stopped between its last all_reduce and the telling.
    """

    def __init__(self, decay: float, gradient: Callable[[int], float]) -> None:
        self._decay, self._gradient = decay, gradient
        self._lock = threading.Lock()
        self._values = [0.0]  # after so many steps
        self._times_s: dict[int, tuple[float, float]] = {}  # of a generation: its first and its last step
        self._told: set[tuple[int, int]] = set()  # of these two generations
        self._problems: list[str] = []
        self.count = 0

    @property
    def generations(self) -> int:
        """That trained."""
        return len(self._times_s)

    def hear(self, step: dict[str, Any]) -> None:
        """What a rank told: generation, step, began_s, value, node."""
        with self._lock:
            self.count += 1
            while len(self._values) <= step["step"] + 1:
                done = len(self._values) - 1
                self._values.append(self._values[-1] * self._decay + self._gradient(done))
            right = self._values[step["step"] + 1]
            if not abs(step["value"] - right) < 1e-9 * max(1.0, abs(right)):
                self._problems.append(f"{step['node']} had {step['value']!r} after step {step['step']}, not {right!r}")
            number, began_s = step["generation"], step["began_s"]
            first_s, last_s = self._times_s.get(number, (began_s, began_s))
            self._times_s[number] = (min(first_s, began_s), max(last_s, began_s))

    def take_problems(self) -> list[str]:
        """Those since the last call."""
        with self._lock:
            problems, self._problems = self._problems, []
            later_s, later = float("inf"), 0
            for number in sorted(self._times_s, reverse=True):
                first_s, last_s = self._times_s[number]
                if last_s > later_s and (number, later) not in self._told:
                    problems.append(f"generation {number} still trained {last_s - later_s:.3f} s after {later} began")
                    self._told.add((number, later))
                if first_s < later_s:
                    later_s, later = first_s, number
            return problems


class FolderWitness(_Thread):
    """No generation completes a checkpoint once a later one has claimed the folder. `count`: checkpoints seen."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._seen: set[str] = set()
        self._claimed = 0
        self._problems: list[str] = []
        self.count = 0

    def look(self) -> None:
        """What is new in it; what was claimed at the look before counts, so that no order inside a look does."""
        claimed = self._claimed
        for path in self._folder.iterdir():
            if match := _CLAIM.fullmatch(path.name):
                self._claimed = max(self._claimed, int(match[1]))
            elif (match := _CHECKPOINT.fullmatch(path.name)) and path.name not in self._seen:
                if not (path / ".metadata").is_file():
                    continue
                self._seen.add(path.name)
                self.count += 1
                if int(match[2]) < claimed:
                    self._problems.append(
                        f"{path.name} was completed after generation {claimed} had claimed the folder"
                    )

    def take_problems(self) -> list[str]:
        """Those since the last call."""
        problems, self._problems = self._problems, []
        return problems


class StallMeter(_Thread):
    """For how long this machine, shared with others, let a thread wait that had slept enough."""

    def __init__(self) -> None:
        super().__init__()
        self._last_s = time.monotonic()
        self._worst_s = 0.0

    def look(self) -> None:
        """How late this look is."""
        now_s = time.monotonic()
        self._worst_s = max(self._worst_s, now_s - self._last_s - _LOOK_S)
        self._last_s = now_s

    def take(self) -> float:
        """The longest since the last call, in seconds."""
        worst_s, self._worst_s = self._worst_s, 0.0
        return worst_s
