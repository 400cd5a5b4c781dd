"""Episode after episode until time is over: one line for each, then the table, and what leaked."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from holmes.lab.stress.faults.catalogue import FAULTS
from holmes.lab.stress.faults.check import Episode, EpisodeResult
from holmes.lab.stress.faults.driver import Driver
from holmes.lab.stress.faults.leaks import descendants, driver_use, problems
from holmes.lab.stress.faults.settings import FaultSettings
from holmes.lab.stress.faults.table import SoakResult
from holmes_comm.errors import UsageError

Say = Callable[[str], None]
_SHOWN = 3  # problems of an episode


def run_faults(settings: FaultSettings, say: Say) -> SoakResult:
    """Runs the episodes; `say` gets a line for each. KeyboardInterrupt ends it early, with the result till then.

    Raises TestbedError, ValueError for an unknown fault.
    """
    unknown = sorted(set(settings.faults) - set(FAULTS))
    if unknown:
        raise UsageError(f"there is no fault {', '.join(unknown)}; there are {', '.join(sorted(FAULTS))}")
    result = SoakResult(settings)
    folder = Path(tempfile.mkdtemp(prefix="holmes-stress-"))
    try:
        with Driver(settings, folder) as driver:
            for name, why in driver.lacks.items():
                if name in settings.faults:
                    result.left_out[name] = why
                    say(f"{name} is left out: it {why}")
            try:
                _run_all(settings, driver, result, say)
            except KeyboardInterrupt:
                result.is_interrupted = True
            for process, uses in driver.uses.items():
                result.leaks += problems(process, uses)
            result.uses = {process: list(uses) for process, uses in driver.uses.items()}
        if left := descendants():
            result.leaks.append(f"processes {left} are left behind")
        result.leaks += problems("the driver", result.driver_uses)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for leak in result.leaks:
        say(f"LEAK: {leak}")
    return result


def _run_all(settings: FaultSettings, driver: Driver, result: SoakResult, say: Say) -> None:
    start_s = time.monotonic()
    numbers = itertools.count() if settings.episode is None else [settings.episode]
    for number in numbers:
        gone_s = time.monotonic() - start_s
        if gone_s >= settings.seconds:
            return
        episode, checked = driver.run(number)
        result.add(episode, checked, time.monotonic() - start_s - gone_s)
        result.driver_uses.append(driver_use())
        say(line_of(episode, checked, gone_s, settings))
        for problem in checked.problems[:_SHOWN]:
            say(f"  PROBLEM: {problem}")
        if len(checked.problems) > _SHOWN:
            say(f"  and {len(checked.problems) - _SHOWN} more")
        if checked.problems:
            say(f"  again: {settings.replay_command(number)}")


def line_of(episode: Episode, checked: EpisodeResult, gone_s: float, settings: FaultSettings) -> str:
    """One episode in a line."""
    what = "; ".join(injection.what for injection in episode.injections) or "no fault: there was no place for it"
    errors = ", ".join(f"{name} {count}" for name, count in sorted(checked.errors.items()))
    slowest = f", the last after {max(checked.report_s.values()):.2f} s" if checked.report_s else ""
    outcome = f"reported by {len(checked.report_s)} ranks{slowest} ({errors})" if errors else "survived"
    state = "WRONG" if checked.problems else "ok"
    return f"[{gone_s:4.0f} of {settings.seconds:.0f} s] episode {episode.number} {state}: {what}: {outcome}"
