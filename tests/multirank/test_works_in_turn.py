"""Who waits for several works in turn moves all of them."""

import pytest
from process_pair import run_pair

pytestmark = pytest.mark.alone  # measures: who gets no processor for 30 us is helped


def test_the_io_thread_is_not_woken_between_two_waits() -> None:
    """But for rounds in which other work took the processors."""
    for rank in run_pair("batches", "auto"):
        assert min(rank["sleeps"]) <= 3, rank
