"""Measuring beside other processes: repeated where disturbed, and whose processor time it was."""

import subprocess
import sys

import pytest

from holmes.tools.bench import quiet
from holmes.tools.bench.quiet import Others, Quiet

BURN_S = 0.3
BURN = f"import time\nwhile time.process_time() < {BURN_S}: pass"


@pytest.mark.parametrize(
    ("others", "found", "calls"),
    [([0.1], 0, 1), ([0.5, 0.2], 1, 2), ([0.9, 0.5, 0.7, 0.0], 1, 3)],
)
def test_a_disturbed_measurement_is_repeated_and_the_quietest_kept(others: list[float], found: int, calls: int) -> None:
    measured = Quiet(most_others=0.2, attempts=3)
    tried: list[int] = []

    def call() -> tuple[int, float]:
        tried.append(len(tried))
        return tried[-1], others[tried[-1]]

    assert measured.measure("a test", call) == found
    assert len(tried) == calls
    assert measured.worst == others[found]


def test_others_are_neither_this_process_nor_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    own_s = {"machine": 100.0}
    monkeypatch.setattr(quiet, "machine_cpu_s", lambda: own_s["machine"])
    with Others() as alone:
        subprocess.run([sys.executable, "-c", BURN], check=True)
        own_s["machine"] += BURN_S  # all that the machine did was the child's
    with Others() as beside:
        own_s["machine"] += 1000.0
    assert alone.cores == 0.0
    assert beside.cores > 0.0
