"""benchmarks/paper.py: what it fits, and that the results kept in the repository are what it computes."""

from __future__ import annotations

import json

import pytest
from paper import Paper, changed, goals_met
from paths import BENCHMARKS

from holmes import files


def test_kept_results_are_what_it_computes() -> None:
    facts = files.load(BENCHMARKS / "paper.yaml")
    kept = json.loads((BENCHMARKS / "results" / "paper.json").read_text())
    assert kept["facts"] == facts
    paper = Paper(facts)
    rates = paper.calibrate()
    for nic, published in facts["calibration"]["rows"].items():
        assert paper.tflops(paper.homogeneous(nic), rates) == pytest.approx(published, rel=1e-6)
    assert rates.link("roce").gbps == pytest.approx(kept["free_numbers"]["roce_gbps"], rel=1e-6)
    speeds = {name: paper.tflops(job, rates) for name, job in paper.published_jobs().items()}
    assert speeds == pytest.approx({row["framework"]: row["predicted_tflops"] for row in kept["predictions"]}, rel=1e-6)
    assert goals_met(facts, speeds) == kept["goals_met"]


def test_a_row_that_no_plausible_number_explains_fails() -> None:
    facts = files.load(BENCHMARKS / "paper.yaml")
    rows = {**facts["calibration"]["rows"], "ethernet": 250}
    with pytest.raises(ValueError, match="no ethernet rate in Gbit/s between 1 and 800 gives 250"):
        changed(facts, "calibration", rows=rows).calibrate()
