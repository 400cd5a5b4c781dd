"""Injected faults of elastic jobs: the judge of what their ranks did, and whole jobs with a fault each."""

import json
import subprocess
import sys
from collections import deque
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
typer = pytest.importorskip("typer", reason="needs typer: pip install '.[lab]'")

from holmes.lab.stress.elastic.check import error_problems, progress_problems  # noqa: E402
from holmes.lab.stress.elastic.expected import DECAY, gradient, unbroken  # noqa: E402
from holmes.lab.stress.elastic.settings import STEPS  # noqa: E402


def rank(place, events, returncode=0):
    def said(name):
        return next((event for event in events if event["event"] == name), None)

    process = SimpleNamespace(returncode=returncode)
    return SimpleNamespace(place=place, events=events, said=said, process=process, last=deque())


def steps(numbers, generation, from_s):
    return [
        {"event": "step", "generation": generation, "step": step, "began_s": from_s + step / 100, "ranks": 2}
        for step in numbers
    ]


def job(*ranks):
    return SimpleNamespace(all=ranks)


DONE = {"event": "done", "value": unbroken(STEPS)}


def test_an_unbroken_run_is_the_sum_of_its_steps():
    assert unbroken(0) == 0
    assert unbroken(2) == gradient(0) * DECAY + gradient(1)


def test_a_run_that_went_as_unbroken_has_no_problems():
    first = steps(range(30), 1, 0.0)
    assert progress_problems(job(rank(0, [*first, *steps(range(20, STEPS), 2, 5.0), DONE]))) == []


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([rank(0, [*steps(range(STEPS), 1, 0.0), {**DONE, "value": 1.5}])], "ended with 1.5 instead of"),
        ([rank(0, steps(range(STEPS), 1, 0.0))], "no rank has trained to the end"),
        ([rank(0, [*steps(range(30), 1, 0.0), DONE])], "nobody did the steps [30, 31"),
        (
            [rank(0, [*steps(range(STEPS), 2, 0.1), DONE]), rank(1, steps(range(30), 1, 0.0))],
            "generation 1 still trained 0.19 s after 2 began",
        ),
        ([rank(0, [*steps(range(STEPS), 1, 0.0), DONE]), rank(1, [], returncode=-6)], "rank 1 ended with -6"),
    ],
)
def test_any_other_is_a_problem(ranks, says):
    problems = progress_problems(job(*ranks))
    assert any(says in problem for problem in problems), problems


def test_other_generations_and_errors_than_expected_are_problems():
    right = rank(0, [*steps(range(STEPS), 2, 0.0), DONE])
    assert progress_problems(job(right), generations={1}) == ["there were the generations [2] instead of [1]"]
    lost = rank(1, [{"event": "error", "error": "StoreLostError", "message": ""}], returncode=3)
    assert error_problems([lost], "StoreLostError") == []
    assert "rank 0 ended with 0 instead of StoreLostError" in error_problems([right], "StoreLostError")


@pytest.mark.parametrize("fault", ["disk-full", "checkpoint-corrupt", "stopped-past-lease"])
def test_a_job_goes_as_unbroken_through(fault, tmp_path):
    command = [sys.executable, "-m", "holmes", "stress", "--testbed", "--faults", fault, "--seed", "1"]
    done = subprocess.run(
        [*command, "--seconds", "1", "--save", str(tmp_path / "out")], capture_output=True, text=True, timeout=200
    )
    found = json.loads((tmp_path / "out.json").read_text())["elastic"]
    if fault in found["left_out"]:
        pytest.skip(found["left_out"][fault])
    assert done.returncode == 0, done.stderr
    assert found["faults"] == {fault: {"injected": 1, "right": 1}}
    assert "job 0 ok: " in done.stderr
