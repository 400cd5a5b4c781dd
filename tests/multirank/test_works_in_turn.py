"""Who waits for several works in turn moves all of them."""

import pytest
from process_pair import run_pair

pytestmark = pytest.mark.alone  # measures: who gets no processor for 30 us is helped

PAIRS = 4  # of processes: one of five to ten is helped in all of its rounds, on a quiet machine too


def test_the_io_thread_is_not_woken_between_two_waits() -> None:
    """But for rounds in which other work took the processors."""
    sleeps = []
    for _ in range(PAIRS):
        sleeps.append([min(rank["sleeps"]) for rank in run_pair("batches", "auto")])
        if max(sleeps[-1]) <= 3:
            return
    pytest.fail(f"the I/O threads of both ranks slept so often in the best round of each pair: {sleeps}")
