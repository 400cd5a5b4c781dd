"""A future completes also where memory is short just when its operation ends."""

import os
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("torch.distributed")

from paths import WORKERS

SOURCE = WORKERS.parent / "helpers" / "failing_new.cpp"
COMPILER = os.environ.get("CXX") or shutil.which("c++")


@pytest.fixture
def preload(tmp_path):
    if COMPILER is None:
        pytest.skip("needs a C++ compiler, which makes what is preloaded (apt-get install g++)")
    library = tmp_path / "failing_new.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
    return {"LD_PRELOAD": str(library)}


def test_a_future_completes_where_no_memory_is_left_when_its_operation_ends(tmp_path, preload):
    command = [sys.executable, str(WORKERS / "future_worker.py"), str(tmp_path)]
    other = subprocess.Popen([*command, "1"])
    try:
        done = subprocess.run(
            [*command, "0"], env={**os.environ, **preload}, capture_output=True, text=True, timeout=120, check=False
        )
        said, callback = done.stdout.strip().rsplit(" ", 1)
        assert done.returncode == 0, done.stderr
        assert said == "completed with [4.0]" or said.startswith("failed: "), done.stderr
        assert callback == "True"
    finally:
        other.kill()
        other.wait()
