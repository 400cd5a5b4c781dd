"""Random training programs (generator.py) against plain torch, about a minute of them. Fresh ones: make soak."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

from generator import plan_of  # noqa: E402
from soak import run_seeds  # noqa: E402

#: What they found is mended.
KEPT_SEEDS = [19, 179, 1327, 3081, 3102, 4001, 4049, 6295, 10513, 70723, 71718, 91782, 113439]
FIXED_SEEDS = list(range(1, 81))


def check(seeds, seconds):
    outcomes = run_seeds(seeds, seconds=seconds)
    failed = [f"soak.py --only {outcome.job.program}: {outcome.error}" for outcome in outcomes if outcome.error]
    assert not failed, "\n\n".join(failed)
    return outcomes


def test_seeds_that_once_failed():
    assert len(check(KEPT_SEEDS, 90)) == len(KEPT_SEEDS)


def test_fixed_seeds():
    assert len({plan_of(seed).optimizer for seed in FIXED_SEEDS}) == 11
    assert check(FIXED_SEEDS, 60)
