"""The table of training programs (programs.py) against plain torch. All of it: soak.py --table."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

from harness import DDP, DEFERRED, FSDP2, OURS, UNWATCHED, Job, run_jobs  # noqa: E402
from programs import TABLE  # noqa: E402

GROUPS = {
    "alone": (1, [OURS]),
    "two ranks": (2, [OURS]),
    "two ranks, deferred": (2, [DEFERRED]),
    "DDP and FSDP2": (2, [DDP, FSDP2]),
    "four ranks": (4, [UNWATCHED]),
}


LIMIT_S = 300  # each program has its own; this is for all of them, on a busy machine


@pytest.mark.timeout(LIMIT_S + 120)
@pytest.mark.parametrize("group", GROUPS)
def test_equals_plain_torch(group):
    size, variants = GROUPS[group]
    programs = [p for p in TABLE.values() if size in p.ranks]
    chosen = [(p, v) for p in programs for v in variants if v in p.variants and not (p.error and v != OURS)]
    jobs = [Job("programs", program.name, variant) for program, variant in chosen]
    outcomes = run_jobs(jobs, size, seconds=LIMIT_S)
    failed = [f"{outcome.job} on {size} ranks: {outcome.error}" for outcome in outcomes if outcome.error]
    assert not failed, "\n\n".join(failed)
    assert len(outcomes) == len(jobs), f"only {len(outcomes)} of {len(jobs)} programs ran in time"


def test_the_table_is_large():
    assert len(TABLE) > 140
