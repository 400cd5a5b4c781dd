"""Programs that tests start (tests/workers) import what is in tests/helpers, and say where they are when they crash."""

import os
from pathlib import Path

_before = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
os.environ["PYTHONPATH"] = os.pathsep.join([*_before, str(Path(__file__).parent / "helpers")])
