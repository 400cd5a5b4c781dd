"""Programs that tests start (tests/workers) import what is in tests/helpers, as the tests themselves do."""

import os
from pathlib import Path

_before = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
os.environ["PYTHONPATH"] = os.pathsep.join([*_before, str(Path(__file__).parent / "helpers")])
