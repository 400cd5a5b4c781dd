"""Programs that tests start (tests/workers) import what is in tests/helpers, and say where they are when they crash.
Under `pytest -n` a file's tests stay together (--dist loadfile), those that wait most come first, and files that are
marked `alone` last, and have the machine to themselves."""

import contextlib
import fcntl
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import running

_FOLDER = Path(__file__).parent
_LONGEST_WAIT_S = 900.0
_ORDER = ("testbed", "torch", "multirank", "differential", "other folders", "alone")
_before = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
os.environ["PYTHONPATH"] = os.pathsep.join([*_before, str(_FOLDER / "helpers")])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """What one test leaves behind would decide what another one measures."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    for variables in (before, after):
        for name in ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"):  # torch's first optimizer sets it
            variables.pop(name, None)
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    for name in changed:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    assert not changed, f"the test leaves other environment variables behind: {sorted(changed)}"


@pytest.fixture(autouse=True)
def _errors_of_other_tests_hold_no_descriptors() -> Iterator[None]:
    """A caught error's traceback holds the communicator that raised it until Python looks for cycles."""
    yield
    if len(os.listdir("/proc/self/fd")) > 128:
        gc.collect()


def _turn(item: pytest.Item) -> int:
    folder = "alone" if item.get_closest_marker("alone") else item.path.relative_to(_FOLDER).parts[0]
    return _ORDER.index(folder if folder in _ORDER else "other folders")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # waits before pytest-timeout's clock runs
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not hasattr(item.config, "workerinput"):  # one process for all tests
        return (yield)
    turn, machine = (os.open(folder, os.O_RDONLY) for folder in (_FOLDER / "helpers", _FOLDER))
    try:
        _lock(turn, fcntl.LOCK_EX)  # who waits for the whole machine is not overtaken
        _lock(machine, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        return (yield)
    finally:
        for held in (turn, machine):
            fcntl.flock(held, fcntl.LOCK_UN)  # also of a child that the test left behind, which has it too
            os.close(held)


def _lock(folder: int, kind: int) -> None:
    """Waits longer than any test may take, and not for ever for a process that a test left behind."""
    end_s = time.monotonic() + _LONGEST_WAIT_S
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(folder, kind | fcntl.LOCK_NB)
            return
        if time.monotonic() > end_s:
            path = os.readlink(f"/proc/self/fd/{folder}")
            holders = running.processes_that_hold(path)
            raise TimeoutError(f"no test may run since {_LONGEST_WAIT_S:.0f} s: {path} is locked by one of {holders}")
        time.sleep(0.02)
