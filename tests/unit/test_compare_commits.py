"""`benchmarks/compare_commits.py`: ratios of turns, and what counts as a regression."""

import pytest
from compare_commits import ROOT, Comparison, Job, compare


def test_regressions_are_judged_by_the_median_over_turns():
    turns = [(10.0, 10.0, 20.0), (10.0, 10.0, 13.0), (40.0, 40.0, 10.0)]
    result = Comparison.of(turns)
    assert (result.before_s, result.now_s) == (10.0, 13.0)
    assert result.faster == pytest.approx(10 / 13)
    assert result.control == 1.0
    assert result.slower(0.25)
    assert not result.slower(0.35)


def test_what_two_copies_of_the_same_commit_differ_by_is_no_regression():
    result = Comparison.of([(10.0, 15.0, 16.0)] * 3)
    assert not result.slower(0.05)
    assert Comparison.of([(10.0, 15.0, 25.0)] * 3).slower(0.05)


def test_ranks_use_the_packages_of_a_tree(tmp_path):
    case = ("barrier", "shm", 1024)
    result = compare(ROOT, ROOT, case, turns=2)
    assert 0 < result.now_s < 1
    (tmp_path / "holmes_comm").mkdir()
    (tmp_path / "holmes_comm" / "__init__.py").write_text("raise ImportError('of this tree')")
    job = Job(tmp_path, case)
    try:
        with pytest.raises(SystemExit, match=r"a rank with the packages of .* failed"):
            job.call(1)
    finally:
        job.close()
