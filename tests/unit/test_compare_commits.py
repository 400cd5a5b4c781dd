"""`benchmarks/compare_commits.py`: ratios of runs in turns, and what counts as a regression."""

import pytest
from compare_commits import ROOT, compare, run_benchmarks, slower


def test_regressions_are_judged_by_the_median_over_rounds():
    base = [{"a": 10.0, "b": 10.0}, {"a": 10.0, "b": 10.0}, {"a": 10.0, "b": 10.0, "gone": 1.0}]
    own = [{"a": 5.0, "b": 13.0, "new": 1.0}, {"a": 40.0, "b": 12.0}, {"a": 5.0, "b": 20.0}]
    ratios = compare(base, own)
    assert ratios == {"a": 2.0, "b": pytest.approx(10 / 13)}
    assert slower(ratios, 0.25) == ["b"]
    assert slower(ratios, 0.35) == []


def test_benchmarks_run_on_the_packages_of_a_tree(tmp_path):
    medians = run_benchmarks(ROOT, ["-k", "barrier and shm"])
    assert list(medians) == ["test_collective[barrier-shm-1024]"]
    (tmp_path / "holmes_comm").mkdir()
    (tmp_path / "holmes_comm" / "__init__.py").write_text("raise ImportError('of this tree')")
    with pytest.raises(SystemExit, match=r"benchmarks of .* failed"):
        run_benchmarks(tmp_path, ["-k", "barrier and shm"])
