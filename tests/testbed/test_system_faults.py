"""Faults of the system under a job's ranks, one kind after the other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import needs_namespaces

pytestmark = pytest.mark.alone  # its episodes have deadlines of their own


@needs_namespaces
@pytest.mark.parametrize("fault", ["flipped-bit", "no-threads", "hung-folder", "unasked-messages"])
def test_faults_of_the_system_are_reported_by_name(tmp_path: Path, fault: str) -> None:
    command = [sys.executable, "-m", "holmes", "stress", "--testbed", "--faults", fault, "--seed", "1"]
    done = subprocess.run(
        [*command, "--seconds", "8", "--save", str(tmp_path / "out")], capture_output=True, text=True, timeout=120
    )
    assert (tmp_path / "out.json").exists(), done.stderr
    found = json.loads((tmp_path / "out.json").read_text())["holmes"]
    if fault in found["left_out"]:
        pytest.skip(found["left_out"][fault])
    assert done.returncode == 0, done.stderr
    (row,) = found["faults"].values()
    assert row["injected"] == row["right"] == row["reported"] > 0
