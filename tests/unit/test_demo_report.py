"""What the demo says of a run: one number for one thing, on the terminal, in the table and in the picture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: the demo's modules import it")
pytest.importorskip("matplotlib", reason="needs matplotlib: it draws")

from matplotlib.axes import Axes

from holmes.lab.demo import timeline
from holmes.lab.demo.run_demo import progress_note
from holmes.lab.demo.runs import Run

RANKS = 4
#: Of each step: the slowest rank's time in s; the last one is slow.
SLOWEST_S = [0.9, 0.5, 0.20, 0.21, 0.22, 0.23, 0.40]


@pytest.fixture
def run() -> Run:
    """Ranks of which the last is the slowest in each step; the step in the picture is the last one."""
    made = Run("holmes", "Holmes", "script", "holmes", RANKS)
    for step, slowest_s in enumerate(SLOWEST_S):
        for rank in range(RANKS):
            made.steps.append({"rank": rank, "step": step, "loss": 1.0, "step_s": slowest_s * (rank + 1) / RANKS})
    spans = [{"kind": "step", "start_s": 5.0, "end_s": 5.0 + SLOWEST_S[-1]}]
    made.ends = [{"rank": rank, "node": "", "spans": spans} for rank in range(RANKS)]
    return made


def test_the_bar_ends_with_the_step_of_the_table(run: Run) -> None:
    assert progress_note(run).endswith(f"{1000 * run.step_s():.0f} ms/step")


def test_the_pictures_title_says_how_long_its_step_is(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    original = Axes.set_title

    def set_title(axes: Any, text: str, **options: Any) -> Any:
        titles.append(text)
        return original(axes, text, **options)

    monkeypatch.setattr(Axes, "set_title", set_title)
    timeline.draw_timeline(tmp_path / "t.png", run, run)
    assert len(titles) == 3
    for title in titles:
        found = re.search(r"this step (\d+) ms, median (\d+) ms", title)
        assert found, title
        assert [int(number) for number in found.groups()] == [1000 * SLOWEST_S[-1], round(1000 * run.step_s())]
