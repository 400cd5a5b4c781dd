"""Communicators against numpy: a while of buffers_fuzz.py (longer: its own command), and that it would notice."""

from __future__ import annotations

import os
import re

import buffers_fuzz
import numpy as np
import pytest

#: Another piece of the sequence: HOLMES_FUZZ_SEED=1000 pytest tests/multirank/test_buffers_fuzz.py
_SEED = int(os.environ.get("HOLMES_FUZZ_SEED", "1"))


def test_random_operations_on_random_buffers() -> None:
    cases, failure = buffers_fuzz.run(_SEED, seconds=15.0, cases=200)
    assert failure is None, str(failure)
    assert cases > 5


def test_every_operation_and_dtype_comes_up() -> None:
    steps = [buffers_fuzz.Step(f"{seed}", 0, 4) for seed in range(400)]
    assert {step.kind for step in steps} == set(buffers_fuzz.OPERATIONS)
    assert {step.dtype.name for step in steps} == set(buffers_fuzz.DTYPES)
    assert {step.op for step in steps} == set(buffers_fuzz.REDUCTIONS)


def test_what_is_wrong_is_reported_with_the_command_that_shows_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(buffers_fuzz.REDUCTIONS, "sum", np.bitwise_or)
    monkeypatch.setattr(buffers_fuzz, "DTYPES", ["int32"])
    monkeypatch.setattr(buffers_fuzz, "reductions_of", lambda dtype: ["sum"])
    cases, failure = buffers_fuzz.run(1, seconds=60.0, cases=200)
    assert failure is not None
    assert failure.seed == cases  # it stops there
    assert re.search(r"rank \d, block \d, operation \d: \w+: \d+ of \d+ int32 differ, the first at \d+", str(failure))
    assert f"again: python tests/multirank/buffers_fuzz.py --seed {failure.seed} --cases 1" in str(failure)
    assert buffers_fuzz.run(failure.seed, seconds=60.0, cases=1)[1] is not None


def test_a_byte_beside_a_buffer_is_noticed() -> None:
    block = buffers_fuzz.Block(buffers_fuzz.DType("float32"), np.zeros(3, "f4"), shift=3)
    block.check("before")
    block.raw[block.inside.stop] = 0
    with pytest.raises(AssertionError, match="beside the buffer"):
        block.check("after")
