"""Where things are in the tree, for tests in any folder."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
FIXTURES = ROOT / "tests" / "fixtures"
WORKERS = ROOT / "tests" / "workers"
