"""`python -m holmes.bench SETTINGS COMMAND JSON_PATH`: one rank, started by `launch`."""

import sys
from pathlib import Path

from holmes.bench.rank import run_rank
from holmes.bench.settings import Settings

if __name__ == "__main__":
    settings, command, json_path = sys.argv[1:]
    sys.exit(0 if run_rank(Settings.from_json(settings), command, Path(json_path) if json_path else None) else 1)
